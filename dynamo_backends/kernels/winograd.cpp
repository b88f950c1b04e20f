// Convolutions of stride 1 by Winograd's minimal filtering, images channels last.
//
// Images, V and U are stored as numbers.h says; transforms and sums are float32 in either case.
//
// A chunk of tiles at a time: all its tiles are transformed to V, one matrix (tiles, C) for each
// element of a tile; these are multiplied by U, the transformed weight, to M, of matrices
// (tiles, K); and M is transformed to pixels. The chunk is so small that V and M stay in the cache,
// and so large that U, which is read once for each chunk, does not cost more than the products.
// Where U is small, each thread works on chunks of its own, whose V and M stay in its own cache.
//
// Matrices lie in the order in which products go through them: V as (blocks of ROWS tiles, vectors
// of channels, ROWS, LANES), U as (panels, C, PANEL), M as (blocks, panels, ROWS, PANEL).
//
// For each filtering F winograd.py inserts its transforms here, and a function at the end.

#include <torch/csrc/inductor/cpp_prefix.h>

#include <cstdint>
#include <cstring>

#include "numbers.h"

constexpr int64_t COLUMNS = 2;                    // vectors of a row of M that are summed at once
constexpr int64_t PANEL = COLUMNS * LANES;        // elements of such a row
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;    // of M; ROWS * COLUMNS sums are in registers
constexpr int64_t DEPTH = 32;                     // words that such a sum goes over

struct Sizes {
    int64_t batch, height, width, channels;       // of the input
    int64_t out_height, out_width, out_channels;
    int64_t top, left;                            // padding
    int64_t relu;                                 // whether it follows
    int64_t chunk;                                // tiles at a time
    int64_t shared;                               // whether all threads work on the same chunk
    int64_t threads;
};

@TRANSFORMS@

struct Tile {
    int64_t image, y, x;  // the tile's first output
};

template <class F>
static inline Tile tile_of(int64_t number, const Sizes& s) {
    const int64_t across = (s.out_width + F::m - 1) / F::m;
    const int64_t down = (s.out_height + F::m - 1) / F::m;
    return {number / (across * down), number / across % down * F::m, number % across * F::m};
}

// Where a row of a matrix begins, of which each block of ROWS has so many columns.
static inline int64_t start_of(int64_t row, int64_t columns, int64_t width) {
    return row / ROWS * ROWS * columns + row % ROWS * width;
}

// Rows that V and M have room for.
static inline int64_t room(const Sizes& s) {
    return (s.chunk + ROWS - 1) / ROWS * ROWS;
}

// V[i, j, row, :] = (B' d B)[i, j] of one tile d, for all channels.
template <class F, class Type>
static void transform_input(const typename Type::Number* input, const typename Type::Number* zeros,
                            float* v, int64_t row, Tile tile, const Sizes& s) {
    using Number = typename Type::Number;
    constexpr int n = F::m + F::taps - 1;
    const Number* pixels[n][n];
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) {
            const int64_t y = tile.y + i - s.top, x = tile.x + j - s.left;
            const bool inside = y >= 0 && y < s.height && x >= 0 && x < s.width;
            const int64_t at = ((tile.image * s.height + y) * s.width + x) * s.channels;
            pixels[i][j] = inside ? input + at : zeros;
        }
    }
    const int64_t words = s.channels / Type::IN_WORD;
    const int64_t matrix = room(s) * words;
    v += start_of(row, words, LANES);
    for (int64_t c = 0; c < s.channels; c += LANES) {
        const int64_t in_vector = c % (LANES * Type::IN_WORD);
        Number* const to = (Number*)(v + (c - in_vector) / Type::IN_WORD * ROWS) + in_vector;
        Vec rows[n][n];
        for (int j = 0; j < n; j++) {
            Vec d[n], r[n];
            for (int i = 0; i < n; i++) d[i] = Type::load(pixels[i][j] + c);
            F::input(d, r);
            for (int i = 0; i < n; i++) rows[i][j] = r[i];
        }
        for (int i = 0; i < n; i++) {
            Vec r[n];
            F::input(rows[i], r);
            for (int j = 0; j < n; j++) {
                Type::store(r[j], to + (i * n + j) * matrix * Type::IN_WORD);
            }
        }
    }
}

// R rows and one panel of a product of two matrices, in sums of DEPTH words: a sum that grows
// longer is rounded off more with each term.
template <int64_t R, class Type>
static inline void multiply(const float* a, int64_t depth, const float* b, float* result) {
    for (int64_t first = 0; first < depth; first += DEPTH) {
        const int64_t end = std::min(first + DEPTH, depth);
        Vec sums[R][COLUMNS];
        for (int i = 0; i < R; i++) {
            for (int j = 0; j < COLUMNS; j++) sums[i][j] = Vec(0.0f);
        }
        for (int64_t k = first; k < end; k += LANES) {
            for (int64_t lane = 0; lane < LANES; lane++) {
                Vec line[COLUMNS];
                for (int j = 0; j < COLUMNS; j++) {
                    line[j] = Vec::loadu(b + (k + lane) * PANEL + j * LANES);
                }
#pragma GCC unroll 16
                for (int i = 0; i < R; i++) {
                    const Vec factor(a[k * ROWS + i * LANES + lane]);
                    for (int j = 0; j < COLUMNS; j++) {
                        sums[i][j] = Type::multiply_add(factor, line[j], sums[i][j]);
                    }
                }
            }
        }
        for (int i = 0; i < R; i++) {
            for (int j = 0; j < COLUMNS; j++) {
                float* place = result + i * PANEL + j * LANES;
                (first ? sums[i][j] + Vec::loadu(place) : sums[i][j]).store(place);
            }
        }
    }
}

// All rows and one panel of a product; the last rows in fewer registers.
template <class Type>
static inline void multiply_rows(const float* a, int64_t rows, int64_t depth, const float* b,
                                 int64_t columns, float* result) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        const float* from = a + row * depth;
        float* to = result + row * columns;
        if (rows - row <= ROWS / 3) multiply<ROWS / 3, Type>(from, depth, b, to);
        else if (rows - row <= 2 * ROWS / 3) multiply<2 * ROWS / 3, Type>(from, depth, b, to);
        else multiply<ROWS, Type>(from, depth, b, to);
    }
}

// Pixels of one tile = A' M A + bias + residual, for all channels.
template <class F, class Type>
static void transform_output(const float* m, const float* bias,
                             const typename Type::Number* residual, typename Type::Number* output,
                             int64_t row, Tile tile, const Sizes& s) {
    constexpr int n = F::m + F::taps - 1;
    const int64_t matrix = room(s) * s.out_channels;
    m += start_of(row, s.out_channels, PANEL);
    for (int64_t k = 0; k < s.out_channels; k += LANES) {
        const float* column = m + k / PANEL * ROWS * PANEL + k % PANEL;
        Vec rows[F::m][n];
        for (int j = 0; j < n; j++) {
            Vec d[n], r[F::m];
            for (int i = 0; i < n; i++) {
                d[i] = Vec::loadu(column + (i * n + j) * matrix);
            }
            F::output(d, r);
            for (int i = 0; i < F::m; i++) rows[i][j] = r[i];
        }
        const Vec shift = bias ? Vec::loadu(bias + k) : Vec(0.0f);
        for (int i = 0; i < F::m && tile.y + i < s.out_height; i++) {
            Vec r[F::m];
            F::output(rows[i], r);
            for (int j = 0; j < F::m && tile.x + j < s.out_width; j++) {
                const int64_t pixel =
                    (tile.image * s.out_height + tile.y + i) * s.out_width + tile.x + j;
                Vec value = r[j] + shift;
                if (residual) value = value + Type::load(residual + pixel * s.out_channels + k);
                if (s.relu) value = at::vec::clamp_min(value, Vec(0.0f));
                Type::store(value, output + pixel * s.out_channels + k);
            }
        }
    }
}

// Does pieces of work in each thread: all of them, or its part of what threads share.
template <class Work>
static inline void each(int64_t count, const Sizes& s, Work&& work) {
    if (!s.shared) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
#pragma omp for
    for (int64_t i = 0; i < count; i++) work(i);
}

template <class F, class Type>
static void convolve(const typename Type::Number* input, const float* u, const float* bias,
                     const typename Type::Number* residual, typename Type::Number* output,
                     float* workspace, const Sizes& s) {
    constexpr int64_t elements = (F::m + F::taps - 1) * (F::m + F::taps - 1);
    const int64_t tiles = s.batch * ((s.out_height + F::m - 1) / F::m) *
                          ((s.out_width + F::m - 1) / F::m);
    const int64_t panels = s.out_channels / PANEL;
    const int64_t words = s.channels / Type::IN_WORD;
    const int64_t v_size = elements * room(s) * words;
    const int64_t m_size = elements * room(s) * s.out_channels;
    const auto zeros = (const typename Type::Number*)workspace;
    std::fill(workspace, workspace + words, 0.0f);
#pragma omp parallel num_threads(s.threads)
    {
        // Those that work on one chunk together go through all chunks, as one would.
        const int64_t thread = s.shared ? 0 : omp_get_thread_num();
        const int64_t threads = s.shared ? 1 : omp_get_num_threads();
        float* v = workspace + words + thread * (v_size + m_size);
        float* m = v + v_size;
        for (int64_t first = thread * s.chunk; first < tiles; first += threads * s.chunk) {
            const int64_t count = std::min(s.chunk, tiles - first);
            each(count, s, [&](int64_t t) {
                transform_input<F, Type>(input, zeros, v, t, tile_of<F>(first + t, s), s);
            });
            each(elements * panels, s, [&](int64_t i) {
                const float* a = v + i / panels * room(s) * words;
                const float* b = u + i * words * PANEL;
                float* c = m + i / panels * room(s) * s.out_channels + i % panels * ROWS * PANEL;
                multiply_rows<Type>(a, count, words, b, s.out_channels, c);
            });
            each(count, s, [&](int64_t t) {
                transform_output<F, Type>(m, bias, residual, output, t, tile_of<F>(first + t, s), s);
            });
        }
    }
}

extern "C" int64_t lanes() { return LANES; }
extern "C" int64_t panel() { return PANEL; }
extern "C" int64_t rows() { return ROWS; }
extern "C" int64_t has_bfloat16() { return HAS_BFLOAT16; }

@FUNCTIONS@
