// What is in registers in the middle of a product of matrices, float32.

#include <torch/csrc/inductor/cpp_prefix.h>

#include <cstdint>
#include <type_traits>

using Vec = at::vec::Vectorized<float>;

constexpr int64_t LANES = Vec::size();
constexpr int64_t COLUMNS = 2;                    // vectors of a row that are summed at once
constexpr int64_t PANEL = COLUMNS * LANES;        // elements of such a row
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;    // ROWS * COLUMNS sums are in registers

// Where a row of a matrix begins that lies as (blocks of ROWS rows, columns / width, ROWS, width).
static inline int64_t start_of(int64_t row, int64_t columns, int64_t width) {
    return row / ROWS * ROWS * columns + row % ROWS * width;
}

// sums[i, :] = a[i, first:end] b[first:end, :] for R rows of a block of a, which lies as
// (vectors of columns, ROWS, LANES), and for J vectors of columns of b, which lies as (rows, J).
template <int64_t R, int64_t J>
static inline void sum(const float* a, const float* b, int64_t first, int64_t end,
                       Vec (&sums)[R][J]) {
    for (int64_t i = 0; i < R; i++) {
        for (int64_t j = 0; j < J; j++) sums[i][j] = Vec(0.0f);
    }
    for (int64_t k = first; k < end; k += LANES) {
        const int64_t lanes = std::min(LANES, end - k);  // fewer at the end
        for (int64_t lane = 0; lane < lanes; lane++) {
            Vec line[J];
            for (int64_t j = 0; j < J; j++) {
                line[j] = Vec::loadu(b + ((k + lane) * J + j) * LANES);
            }
#pragma GCC unroll 16
            for (int64_t i = 0; i < R; i++) {
                const Vec factor(a[k * ROWS + i * LANES + lane]);
                for (int64_t j = 0; j < J; j++) {
                    sums[i][j] = at::vec::fmadd(factor, line[j], sums[i][j]);
                }
            }
        }
    }
}

// Calls a function with the number of rows to compute, as a constant, where so many are left.
template <class Function>
static inline void with_rows(int64_t left, Function&& function) {
    if (left <= ROWS / 3) function(std::integral_constant<int64_t, ROWS / 3>());
    else if (left <= 2 * ROWS / 3) function(std::integral_constant<int64_t, 2 * ROWS / 3>());
    else function(std::integral_constant<int64_t, ROWS>());
}
