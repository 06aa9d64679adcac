// The matrix unit (AMX): eight tile registers, each of up to 16 rows of 64 bytes.
//
// A product adds to C (rows of 16 floats) the rows of A (16 pairs of bf16) times B (16 pairs, each for 16 columns). Of
// each pair the first products are summed in order, and the second ones apart; the two sums are added, and the total is
// added to C. A row of C depends on its own row of A only, so not on how many rows there are.
//
// In assembly: intrinsics take a register's number as a literal only, and some compilers do not know that
// a load reads memory.
#pragma once

#include "types.h"

namespace millstream::MS_LEVEL {

constexpr int kUnitRows = 16;
constexpr int kUnitPairs = 16;                // bf16 pairs that one product sums
constexpr int kUnitInputs = 2 * kUnitPairs;

template <int R>
MS_INLINE void load_tile(const void* p, std::ptrdiff_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(row_bytes), "i"(R) : "memory");
}
template <int R>
MS_INLINE void store_tile(void* p, std::ptrdiff_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(row_bytes), "i"(R) : "memory");
}
template <int R>
MS_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(R));
}
template <int C, int A, int B>
MS_INLINE void dot_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// What the registers hold from now on: their shapes. All of them become zero. It takes 230 cycles.
struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<std::uint8_t>(num_rows);
        row_bytes[tile] = static_cast<std::uint16_t>(bytes);
    }
    void use() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }
};

// The registers hold nothing from now on: a thread that sleeps with tiles in use has them saved, and its core awake.
MS_INLINE void release_tiles() { asm volatile("tilerelease"); }

}  // namespace millstream::MS_LEVEL
