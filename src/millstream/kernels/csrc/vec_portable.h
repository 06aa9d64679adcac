// 16 floats and 16 words as plain arrays, for any processor; the compiler makes of the loops what it can.
// Words hold their elements in little-endian order.
#pragma once

#include <cmath>
#include <cstring>

#include "types.h"

#define MS_INLINE static inline __attribute__((always_inline))
#define MS_LANES for (int i = 0; i < kLanes; i++)

namespace millstream::MS_LEVEL {

struct F {  // 16 floats
    alignas(16) float v[kLanes];
};
struct W {  // 16 words of 32 bits
    alignas(16) std::uint32_t v[kLanes];
};

constexpr int kLinearRows = 2;
constexpr int kByteRows = 1;  // of a tile in int8, which has two sets of accumulators
constexpr int kQkRows = 2;
constexpr int kQkTiles = 4;  // accumulators of a tile of scores
constexpr int kPvRows = 2;
constexpr int kPvCols = 2;
constexpr bool kHasTiles = false;

MS_INLINE float to_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
MS_INLINE std::uint32_t to_bits(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
MS_INLINE float widen(bf16 x) { return to_float(static_cast<std::uint32_t>(x.bits) << 16); }
MS_INLINE bf16 narrow(float x) {
    std::uint32_t u = to_bits(x);
    // rounding would carry a NaN's low bits into infinity
    return {static_cast<std::uint16_t>(x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

MS_INLINE F set1(float x) { F r; MS_LANES r.v[i] = x; return r; }
MS_INLINE F zero() { return set1(0.0f); }
MS_INLINE F load(const float* p) { F r; MS_LANES r.v[i] = p[i]; return r; }
MS_INLINE F load(const float* p, int n) { F r; MS_LANES r.v[i] = i < n ? p[i] : 0.0f; return r; }
MS_INLINE F load(const bf16* p) { F r; MS_LANES r.v[i] = widen(p[i]); return r; }
MS_INLINE F load(const bf16* p, int n) { F r; MS_LANES r.v[i] = i < n ? widen(p[i]) : 0.0f; return r; }
MS_INLINE void store(float* p, F x) { MS_LANES p[i] = x.v[i]; }
MS_INLINE void store(float* p, F x, int n) { for (int i = 0; i < n && i < kLanes; i++) p[i] = x.v[i]; }
MS_INLINE void store(bf16* p, F x) { MS_LANES p[i] = narrow(x.v[i]); }
MS_INLINE void store(bf16* p, F x, int n) { for (int i = 0; i < n && i < kLanes; i++) p[i] = narrow(x.v[i]); }

MS_INLINE F operator+(F a, F b) { F r; MS_LANES r.v[i] = a.v[i] + b.v[i]; return r; }
MS_INLINE F operator-(F a, F b) { F r; MS_LANES r.v[i] = a.v[i] - b.v[i]; return r; }
MS_INLINE F operator*(F a, F b) { F r; MS_LANES r.v[i] = a.v[i] * b.v[i]; return r; }
MS_INLINE F operator/(F a, F b) { F r; MS_LANES r.v[i] = a.v[i] / b.v[i]; return r; }
// not fused: without the instruction std::fma is a slow library call
MS_INLINE F fma(F a, F b, F c) { F r; MS_LANES r.v[i] = a.v[i] * b.v[i] + c.v[i]; return r; }
MS_INLINE F max(F a, F b) { F r; MS_LANES r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
MS_INLINE F abs(F a) { F r; MS_LANES r.v[i] = to_float(to_bits(a.v[i]) & 0x7fffffffu); return r; }
MS_INLINE F round(F a) {  // adding 1.5 * 2^23 leaves no bits for a fraction; callers stay within +-2^22
    F r;
    MS_LANES r.v[i] = (a.v[i] + 12582912.0f) - 12582912.0f;
    return r;
}
MS_INLINE F if_less(F x, F bound, F a, F b) { F r; MS_LANES r.v[i] = x.v[i] < bound.v[i] ? a.v[i] : b.v[i]; return r; }
MS_INLINE F scale_pow2(F x, F n) {  // x * 2^n for whole n of -126 .. 127
    F r;
    MS_LANES r.v[i] = x.v[i] * to_float(static_cast<std::uint32_t>(static_cast<int>(n.v[i]) + 127) << 23);
    return r;
}
MS_INLINE F within_exponents(F x) {  // what scale_pow2 can take; a NaN stays one
    x = if_less(x, set1(-126.0f), set1(-126.0f), x);
    return if_less(set1(127.0f), x, set1(127.0f), x);
}
MS_INLINE float sum(F x) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    }
    return x.v[0];
}
MS_INLINE float maximum(F x) {
    float m = x.v[0];
    MS_LANES m = x.v[i] > m ? x.v[i] : m;
    return m;
}
MS_INLINE float first(F x) { return x.v[0]; }

MS_INLINE W load_words(const void* p) { W r; std::memcpy(r.v, p, sizeof r.v); return r; }
MS_INLINE void store_words(void* p, W x) { std::memcpy(p, x.v, sizeof x.v); }
MS_INLINE W set1_word(int x) { W r; MS_LANES r.v[i] = static_cast<std::uint32_t>(x); return r; }
MS_INLINE W spread(const void* p) { int x; std::memcpy(&x, p, 4); return set1_word(x); }
MS_INLINE W spread_low_half(const void* p) { std::uint16_t x; std::memcpy(&x, p, 2); return set1_word(x); }
MS_INLINE W low_halves(W x) { MS_LANES x.v[i] &= 0xffffu; return x; }

// acc + the products of each word's elements, in a fixed order
MS_INLINE F dot(const float*, F acc, W a, W b) {
    MS_LANES acc.v[i] += to_float(a.v[i]) * to_float(b.v[i]);
    return acc;
}
MS_INLINE F dot(const bf16*, F acc, W a, W b) {
    MS_LANES acc.v[i] += to_float(a.v[i] & 0xffff0000u) * to_float(b.v[i] & 0xffff0000u);
    MS_LANES acc.v[i] += to_float(a.v[i] << 16) * to_float(b.v[i] << 16);
    return acc;
}
// integer accumulators: u8 weights times s8 activations, exact
MS_INLINE W dot_bytes(W acc, W weight, W x) {
    MS_LANES {
        for (int shift = 0; shift < 32; shift += 8) {
            int w = static_cast<int>((weight.v[i] >> shift) & 0xffu);
            int a = static_cast<std::int8_t>((x.v[i] >> shift) & 0xffu);
            acc.v[i] += static_cast<std::uint32_t>(w * a);
        }
    }
    return acc;
}
MS_INLINE F to_floats(W x) { F r; MS_LANES r.v[i] = static_cast<float>(static_cast<std::int32_t>(x.v[i])); return r; }
MS_INLINE W add_words(W a, W b) { MS_LANES a.v[i] += b.v[i]; return a; }
MS_INLINE W to_words(F x) {  // to nearest
    x = round(x);
    W r;
    MS_LANES r.v[i] = static_cast<std::uint32_t>(static_cast<std::int32_t>(x.v[i]));
    return r;
}
MS_INLINE int sum_words(W x) {
    std::uint32_t total = 0;
    MS_LANES total += x.v[i];
    return static_cast<int>(total);
}
MS_INLINE void store_bytes(std::int8_t* p, W x) {
    MS_LANES {
        int lane = static_cast<std::int32_t>(x.v[i]);
        p[i] = static_cast<std::int8_t>(lane > 127 ? 127 : lane < -128 ? -128 : lane);
    }
}

// 16 bf16 into the low (half 0) or high (half 1) halves of 16 words. Another thread may write the other halves now.
MS_INLINE void store_halves(std::uint32_t* p, const bf16* x, int half) {
    std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(p) + half;
    MS_LANES halves[2 * i] = x[i].bits;
}

MS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace millstream::MS_LEVEL
