// Linear layers on a few rows: each weight is read once, from memory, at the speed of memory.

#include <torch/csrc/inductor/cpp_prefix.h>

#include <cstdint>

using Vec = at::vec::Vectorized<float>;

constexpr int64_t LANES = Vec::size();
constexpr int64_t MOST = 8;             // rows, whose sums stay in registers
constexpr int64_t BLOCK = 64 * LANES;   // elements that are summed apart: fewer rounding errors

struct Sizes {
    int64_t rows, depth, columns;
    int64_t relu;  // whether it follows
    int64_t threads;
};

// Results of all rows for OUT neighbouring columns, of which each has a row of the weight.
template <int ROWS, int OUT>
static inline void multiply(const float* input, const float* weight, const float* bias,
                            float* output, int64_t column, const Sizes& s) {
    Vec sums[ROWS][OUT];
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < OUT; j++) sums[i][j] = Vec(0.0f);
    }
    const int64_t whole = s.depth / LANES * LANES;
    for (int64_t first = 0; first < whole; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, whole);
        Vec parts[ROWS][OUT];
        for (int i = 0; i < ROWS; i++) {
            for (int j = 0; j < OUT; j++) parts[i][j] = Vec(0.0f);
        }
        for (int64_t k = first; k < end; k += LANES) {
            Vec line[OUT];
            for (int j = 0; j < OUT; j++) line[j] = Vec::loadu(weight + (column + j) * s.depth + k);
            for (int i = 0; i < ROWS; i++) {
                const Vec x = Vec::loadu(input + i * s.depth + k);
                for (int j = 0; j < OUT; j++) parts[i][j] = at::vec::fmadd(x, line[j], parts[i][j]);
            }
        }
        for (int i = 0; i < ROWS; i++) {
            for (int j = 0; j < OUT; j++) sums[i][j] = sums[i][j] + parts[i][j];
        }
    }
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < OUT; j++) {
            float sum = at::vec::vec_reduce_all<float>(
                [](Vec& a, Vec& b) { return a + b; }, sums[i][j], LANES);
            for (int64_t k = whole; k < s.depth; k++) {
                sum += input[i * s.depth + k] * weight[(column + j) * s.depth + k];
            }
            if (bias) sum += bias[column + j];
            if (s.relu && sum < 0.0f) sum = 0.0f;
            output[i * s.columns + column + j] = sum;
        }
    }
}

template <int ROWS>
static void multiply_all(const float* input, const float* weight, const float* bias, float* output,
                         const Sizes& s) {
    constexpr int64_t out = ROWS <= 4 ? 4 : 2;
    const int64_t blocks = s.columns / out;
#pragma omp parallel for num_threads(s.threads)
    for (int64_t block = 0; block < blocks; block++) {
        multiply<ROWS, out>(input, weight, bias, output, block * out, s);
    }
    for (int64_t column = blocks * out; column < s.columns; column++) {
        multiply<ROWS, 1>(input, weight, bias, output, column, s);
    }
}

template <int ROWS>
static void dispatch(const float* input, const float* weight, const float* bias, float* output,
                     const Sizes& s) {
    if (s.rows == ROWS) {
        multiply_all<ROWS>(input, weight, bias, output, s);
    } else if constexpr (ROWS > 1) {
        dispatch<ROWS - 1>(input, weight, bias, output, s);
    }
}

extern "C" int64_t most() { return MOST; }

extern "C" void multiply(const float* input, const float* weight, const float* bias, float* output,
                         const Sizes* s) {
    dispatch<MOST>(input, weight, bias, output, *s);
}
