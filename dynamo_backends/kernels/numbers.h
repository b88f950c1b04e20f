// How images and weights are stored: float32, or bfloat16 where the processor multiplies that.
//
// Both are read in words of 32 bits, of which one of bfloat16 has two numbers. Sums are float32.

using Vec = at::vec::Vectorized<float>;

constexpr int64_t LANES = Vec::size();

struct Float {
    using Number = float;
    static constexpr int64_t IN_WORD = 1;  // numbers

    static inline Vec load(const float* from) { return Vec::loadu(from); }
    static inline void store(Vec x, float* to) { x.store(to); }
    static inline float from(float x) { return x; }
    static inline Vec multiply_add(Vec a, Vec b, Vec sums) { return at::vec::fmadd(a, b, sums); }
};

#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
#define HAS_BFLOAT16 1

struct BFloat16 {
    using Number = uint16_t;
    static constexpr int64_t IN_WORD = 2;

    static inline Vec load(const uint16_t* from) {
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    }
    static inline void store(Vec x, uint16_t* to) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x));
    }
    static inline uint16_t from(uint16_t x) { return x; }
    static inline uint16_t from(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof word);
        const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
        return is_nan ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
    // Of pairs: both products are added to the sum.
    static inline Vec multiply_add(Vec a, Vec b, Vec sums) {
        return _mm512_dpbf16_ps(sums, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
    }
};
#else
#define HAS_BFLOAT16 0
#endif
