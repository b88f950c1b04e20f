// Convolutions of which each result reads few channels: of images, or in groups.
//
// Rows of results are computed a strip at a time. What a strip reads is copied before, channels
// last, with the padding, in the type of the weight; it stays in the cache of its thread. If a max
// pool follows, a thread keeps as many rows of results as its window covers.
//
// Without groups the numbers that a row of the window covers lie next to each other, and are
// multiplied as one row, for PANEL channels and up to PIXELS results at once. An odd row ends with a
// word that has its last two numbers, of which the first has weight zero (see small_channels.py).
//
// With groups a vector has the results of LANES channels. Each reads channels of its own group, so
// the same channels of the input are dealt out to the lanes.

#include <torch/csrc/inductor/cpp_prefix.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numbers.h"

constexpr int64_t COLUMNS = 2;               // vectors of channels that are summed at once
constexpr int64_t PANEL = COLUMNS * LANES;
constexpr int64_t PIXELS = LANES == 16 ? 12 : 6;  // PIXELS * COLUMNS sums are in registers
constexpr int64_t STEP = PIXELS / 3;         // the last pixels of a row are rounded up to that,
constexpr int64_t LEAST_PIXELS = 4;                 // with groups to this; copied rows have room for both
constexpr int64_t IN_GROUPS = 2 * LEAST_PIXELS;     // pixels at once where there are groups
constexpr int64_t MOST_POOLED = @MOST_POOLED@;  // rows that a max pool covers

struct Sizes {
    int64_t batch, channels, height, width;                    // of the image
    int64_t of_batch, of_channel, of_row, of_pixel;            // its strides
    int64_t out_channels, out_height, out_width;
    int64_t window_height, window_width, stride_y, stride_x, top, left;
    int64_t relu;                                              // whether it follows
    int64_t pooled_height, pooled_width;                       // of the max pool after that, if any
    int64_t pool_height, pool_width, pool_stride_y, pool_stride_x, pool_top, pool_left;
    int64_t strip;                                             // rows of results, or pooled ones
    int64_t row;                                               // numbers in a copied row
    int64_t threads;
};

// One row of an image of three planes, channels last.
template <class Type, class Source>
static inline void interleave(const Source* from, typename Type::Number* to, int64_t count,
                              const Sizes& s) {
    int64_t x = 0;
#if HAS_BFLOAT16
    if constexpr (std::is_same_v<Type, BFloat16> && std::is_same_v<Source, float>) {
        // Of 96 numbers, three vectors of 32, the i-th is that of plane i % 3 and pixel i / 3.
        // Two planes are in one permutation, the third is added by another.
        uint16_t two[3][32], third[3][32];
        uint32_t others[3] = {0, 0, 0};
        for (int i = 0; i < 96; i++) {
            two[i / 32][i % 32] = i % 3 * 32 + i / 3;
            third[i / 32][i % 32] = i / 3;
            if (i % 3 == 2) others[i / 32] |= uint32_t(1) << i % 32;
        }
        for (; x + 32 <= count; x += 32) {
            __m512i planes[3];
            for (int c = 0; c < 3; c++) {
                const float* const plane = from + c * s.of_channel + x;
                planes[c] = (__m512i)_mm512_cvtne2ps_pbh(
                    _mm512_loadu_ps(plane + 16), _mm512_loadu_ps(plane));
            }
            for (int i = 0; i < 3; i++) {
                const __m512i mixed = _mm512_permutex2var_epi16(
                    planes[0], _mm512_loadu_si512(two[i]), planes[1]);
                const __m512i all = _mm512_mask_permutexvar_epi16(
                    mixed, others[i], _mm512_loadu_si512(third[i]), planes[2]);
                _mm512_storeu_si512(to + x * 3 + i * 32, all);
            }
        }
    }
#endif
    for (; x < count; x++) {
        for (int c = 0; c < 3; c++) to[x * 3 + c] = Type::from(from[c * s.of_channel + x]);
    }
}

// One row of an image, channels last.
template <class Type, class Source>
static void copy_row(const Source* from, typename Type::Number* to, int64_t count,
                     const Sizes& s) {
    if (s.of_channel == 1 && s.of_pixel == s.channels) {
        if constexpr (std::is_same_v<Source, typename Type::Number>) {
            std::memcpy(to, from, count * s.channels * sizeof(Source));
        } else {
            for (int64_t i = 0; i < count * s.channels; i++) to[i] = Type::from(from[i]);
        }
    } else if (s.of_pixel == 1 && s.channels == 3) {
        interleave<Type>(from, to, count, s);
    } else {
        for (int64_t x = 0; x < count; x++) {
            for (int64_t c = 0; c < s.channels; c++) {
                to[x * s.channels + c] = Type::from(from[x * s.of_pixel + c * s.of_channel]);
            }
        }
    }
}

// What a strip of results reads, which begins in a certain row of the image, perhaps above it.
template <class Type, class Source>
static void copy_strip(const Source* image, typename Type::Number* to, int64_t first, int64_t rows,
                       const Sizes& s) {
    const int64_t pixels = s.row / s.channels, left = std::min(s.left, pixels);
    const int64_t count = std::min(s.width, pixels - left);
    for (int64_t y = first; y < first + rows; y++, to += s.row) {
        const bool inside = y >= 0 && y < s.height;
        const int64_t begin = inside ? left * s.channels : s.row;
        const int64_t end = inside ? begin + count * s.channels : s.row;
        std::fill(to, to + begin, 0);
        if (inside) copy_row<Type>(image + y * s.of_row, to + begin, count, s);
        std::fill(to + end, to + s.row, 0);
    }
}

template <class Number>
static inline Vec broadcast_word(const Number* from) {
    float word;
    std::memcpy(&word, from, sizeof word);
    return Vec(word);
}

// Results of one vector of channels.
template <class Type>
static inline void store(Vec sum, Vec shift, typename Type::Number* output, const Sizes& s) {
    Vec value = sum + shift;
    if (s.relu) value = at::vec::clamp_min(value, Vec(0.0f));
    Type::store(value, output);
}

// R pixels of a panel. `window` is what the first one reads.
template <int64_t R, class Type>
static inline void multiply(const typename Type::Number* window, const float* weight,
                            const float* bias, typename Type::Number* output, int64_t count,
                            const Sizes& s) {
    Vec sums[R][COLUMNS];
    for (int i = 0; i < R; i++) {
        for (int j = 0; j < COLUMNS; j++) sums[i][j] = Vec(0.0f);
    }
    const int64_t width = s.window_width * s.channels, step = s.stride_x * s.channels;
    for (int64_t y = 0; y < s.window_height; y++, window += s.row) {
        for (int64_t k = 0; k < width; k += Type::IN_WORD, weight += PANEL) {
            const auto* const from = window + std::min(k, width - Type::IN_WORD);
            Vec line[COLUMNS];
            for (int j = 0; j < COLUMNS; j++) line[j] = Vec::loadu(weight + j * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < R; i++) {
                const Vec factor = broadcast_word(from + i * step);
                for (int j = 0; j < COLUMNS; j++) {
                    sums[i][j] = Type::multiply_add(factor, line[j], sums[i][j]);
                }
            }
        }
    }
    Vec shift[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) shift[j] = bias ? Vec::loadu(bias + j * LANES) : Vec(0.0f);
    for (int i = 0; i < R; i++) {
        for (int j = 0; j < COLUMNS; j++) {
            auto* const to = output + i * s.out_channels + j * LANES;
            if (i < count) store<Type>(sums[i][j], shift[j], to, s);
        }
    }
}

// A row of results for all channels.
struct Dense {
    template <class Type>
    static void compute(const typename Type::Number* rows, const float* weight, const float* bias,
                        typename Type::Number* output, const Sizes& s) {
        const int64_t width = s.window_width * s.channels;
        const int64_t words = (width + Type::IN_WORD - 1) / Type::IN_WORD;
        for (int64_t k = 0; k < s.out_channels; k += PANEL) {
            const float* const b = bias ? bias + k : nullptr;
            for (int64_t x = 0; x < s.out_width; x += PIXELS) {
                const auto* const window = rows + x * s.stride_x * s.channels;
                const int64_t count = std::min(s.out_width - x, PIXELS);
                auto* const to = output + x * s.out_channels + k;
                if (count <= STEP) multiply<STEP, Type>(window, weight, b, to, count, s);
                else if (count <= 2 * STEP) multiply<2 * STEP, Type>(window, weight, b, to, count, s);
                else multiply<PIXELS, Type>(window, weight, b, to, count, s);
            }
            weight += s.window_height * words * PANEL;
        }
    }
};

#ifdef CPU_CAPABILITY_AVX512
#define HAS_GROUPS 1
using Places = __m512i;

static inline Places load_places(const int32_t* from) { return _mm512_loadu_si512(from); }
static inline Vec deal(Vec words, Places places) {
    return _mm512_permutexvar_ps(places, words);
}
static inline Vec load_words(const float* from) { return Vec::loadu(from); }
static inline Vec load_words(const uint16_t* from) {
    return _mm512_castps256_ps512(_mm256_loadu_ps((const float*)from));
}
#elif defined(CPU_CAPABILITY_AVX2)
#define HAS_GROUPS 1
using Places = __m256i;

static inline Places load_places(const int32_t* from) {
    return _mm256_loadu_si256((const __m256i*)from);
}
static inline Vec deal(Vec words, Places places) {
    return _mm256_permutevar8x32_ps(words, places);
}
static inline Vec load_words(const float* from) { return Vec::loadu(from); }
#else
#define HAS_GROUPS 0
#endif

#if HAS_GROUPS
// A row of results of groups of CHANNELS channels, whose windows are WINDOW pixels wide.
template <int64_t CHANNELS, int64_t STRIDE>
struct Groups {
    static constexpr int64_t WINDOW = 3;

    template <class Type>
    static void compute(const typename Type::Number* rows, const float* weight, const float* bias,
                        typename Type::Number* output, const Sizes& s) {
        constexpr int64_t WORDS = CHANNELS / Type::IN_WORD;
        int32_t numbers[WORDS][LANES];
        Places places[WORDS];
        for (int word = 0; word < WORDS; word++) {
            for (int lane = 0; lane < LANES; lane++) {
                numbers[word][lane] = lane / CHANNELS * WORDS + word;
            }
            places[word] = load_places(numbers[word]);
        }
        for (int64_t k = 0; k < s.out_channels; k += LANES) {
            const float* const b = bias ? bias + k : nullptr;
            for (int64_t x = 0; x < s.out_width; x += IN_GROUPS) {
                const auto* const window = rows + x * STRIDE * s.channels + k;
                const int64_t count = std::min(s.out_width - x, IN_GROUPS);
                auto* const to = output + x * s.out_channels + k;
                if (count <= LEAST_PIXELS) {
                    multiply<LEAST_PIXELS, Type>(window, weight, b, to, count, places, s);
                } else {
                    multiply<IN_GROUPS, Type>(window, weight, b, to, count, places, s);
                }
            }
            weight += s.window_height * WINDOW * WORDS * LANES;
        }
    }

    template <int64_t R, class Type, size_t WORDS>
    static inline void multiply(const typename Type::Number* window, const float* weight,
                                const float* bias, typename Type::Number* output, int64_t count,
                                const Places (&places)[WORDS], const Sizes& s) {
        Vec sums[R];
        for (int i = 0; i < R; i++) sums[i] = Vec(0.0f);
        for (int64_t y = 0; y < s.window_height; y++, window += s.row) {
            Vec line[WINDOW][WORDS];
            for (int j = 0; j < WINDOW; j++) {
                for (int word = 0; word < WORDS; word++, weight += LANES) {
                    line[j][word] = Vec::loadu(weight);
                }
            }
#pragma GCC unroll 32
            for (int x = 0; x < (R - 1) * STRIDE + WINDOW; x++) {
                const Vec words = load_words(window + x * s.channels);
#pragma GCC unroll 32
                for (int word = 0; word < WORDS; word++) {
                    const Vec dealt = deal(words, places[word]);
#pragma GCC unroll 8
                    for (int j = 0; j < WINDOW; j++) {
                        const int i = x - j;
                        if (i >= 0 && i % STRIDE == 0 && i / STRIDE < R) {
                            sums[i / STRIDE] =
                                Type::multiply_add(dealt, line[j][word], sums[i / STRIDE]);
                        }
                    }
                }
            }
        }
        const Vec shift = bias ? Vec::loadu(bias) : Vec(0.0f);
        for (int i = 0; i < R; i++) {
            if (i < count) store<Type>(sums[i], shift, output + i * s.out_channels, s);
        }
    }
};
#endif

// Places that a window covers, from `begin` until before `end`.
struct Range {
    int64_t begin, end;
};

static inline Range covered(int64_t place, int64_t stride, int64_t padding, int64_t window,
                            int64_t size) {
    const int64_t begin = place * stride - padding;
    return {std::max<int64_t>(begin, 0), std::min(begin + window, size)};
}

static inline Range pooled_rows(int64_t row, const Sizes& s) {
    return covered(row, s.pool_stride_y, s.pool_top, s.pool_height, s.out_height);
}

// Of the rows of results the last `pool_height` ones are kept, in turn.
template <class Number>
static inline Number* kept_row(Number* kept, int64_t y, const Sizes& s) {
    return kept + y % s.pool_height * s.out_width * s.out_channels;
}

// A row of maxima.
template <class Type>
static void pool_row(typename Type::Number* kept, Range y, typename Type::Number* output,
                     const Sizes& s) {
    const typename Type::Number* rows[MOST_POOLED];
    const int64_t height = y.end - y.begin;
    for (int64_t i = 0; i < height; i++) rows[i] = kept_row(kept, y.begin + i, s);
    for (int64_t j = 0; j < s.pooled_width; j++, output += s.out_channels) {
        const Range x = covered(j, s.pool_stride_x, s.pool_left, s.pool_width, s.out_width);
        const int64_t begin = x.begin * s.out_channels, end = x.end * s.out_channels;
        for (int64_t k = 0; k < s.out_channels; k += LANES) {
            Vec most = Type::load(rows[0] + begin + k);
            for (int64_t i = 0; i < height; i++) {
                for (int64_t l = begin + k; l < end; l += s.out_channels) {
                    most = at::vec::maximum(most, Type::load(rows[i] + l));  // NaN if one is
                }
            }
            Type::store(most, output + k);
        }
    }
}

template <class Type, class Rows, class Source>
static void convolve(const Source* image, const float* weight, const float* bias,
                     typename Type::Number* output, typename Type::Number* workspace,
                     const Sizes& s) {
    const bool pooled = s.pool_height > 0;
    const int64_t height = pooled ? s.pooled_height : s.out_height;
    const int64_t row = (pooled ? s.pooled_width : s.out_width) * s.out_channels;
    const int64_t strips = (height + s.strip - 1) / s.strip;
    const int64_t most = pooled ? (s.strip - 1) * s.pool_stride_y + s.pool_height : s.strip;
    const int64_t room = ((most - 1) * s.stride_y + s.window_height) * s.row;
    const int64_t room_for_kept = s.pool_height * s.out_width * s.out_channels;
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
    for (int64_t i = 0; i < s.batch * strips; i++) {
        auto* const copied = workspace + omp_get_thread_num() * (room + room_for_kept);
        auto* const kept = copied + room;
        const int64_t number = i / strips, begin = i % strips * s.strip;
        const int64_t end = std::min(begin + s.strip, height);
        const Range rows = pooled ? Range{pooled_rows(begin, s).begin, pooled_rows(end - 1, s).end}
                                  : Range{begin, end};
        const int64_t first = rows.begin * s.stride_y - s.top;
        copy_strip<Type>(image + number * s.of_batch, copied, first,
                         (rows.end - rows.begin - 1) * s.stride_y + s.window_height, s);
        auto* to = output + (number * height + begin) * row;
        const auto compute = [&](int64_t y, typename Type::Number* result) {
            const auto* const from = copied + (y - rows.begin) * s.stride_y * s.row;
            Rows::template compute<Type>(from, weight, bias, result, s);
        };
        if (!pooled) {
            for (int64_t y = begin; y < end; y++, to += row) compute(y, to);
            continue;
        }
        int64_t next = rows.begin;
        for (int64_t y = begin; y < end; y++, to += row) {
            const Range under = pooled_rows(y, s);
            for (next = std::max(next, under.begin); next < under.end; next++) {
                compute(next, kept_row(kept, next, s));
            }
            pool_row<Type>(kept, under, to, s);
        }
    }
}

extern "C" int64_t lanes() { return LANES; }
extern "C" int64_t panel() { return PANEL; }
extern "C" int64_t least_pixels() { return LEAST_PIXELS; }
extern "C" int64_t has_groups() { return HAS_GROUPS; }
extern "C" int64_t has_bfloat16() { return HAS_BFLOAT16; }

@FUNCTIONS@
