// 16 floats and 16 words as pairs of AVX2 registers.
#pragma once

#include <immintrin.h>

#include "types.h"

#define MS_INLINE static inline __attribute__((always_inline))

namespace millstream::MS_LEVEL {

struct F {  // 16 floats
    __m256 a, b;
};
struct W {  // 16 words of 32 bits
    __m256i a, b;
};

constexpr int kLinearRows = 2;  // 16 registers hold 8 accumulators, 4 of weights and what bf16 needs to unfold
constexpr int kByteRows = 1;  // of a tile in int8, which has two sets of accumulators
constexpr int kQkRows = 2;
constexpr int kQkTiles = 4;  // accumulators of a tile of scores
constexpr int kPvRows = 2;
constexpr int kPvCols = 2;
constexpr bool kHasTiles = false;

MS_INLINE __m256i lane_mask(int n) {  // all ones in the first n of 8 lanes
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

MS_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
MS_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MS_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MS_INLINE F load(const float* p, int n) {
    return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))};
}
MS_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
MS_INLINE void store(float* p, F x, int n) {
    _mm256_maskstore_ps(p, lane_mask(n), x.a);
    _mm256_maskstore_ps(p + 8, lane_mask(n - 8), x.b);
}

MS_INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
MS_INLINE __m128i narrow(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    // rounding would carry a NaN's low bits into infinity
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
MS_INLINE F load(const bf16* p) {
    return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
MS_INLINE void store(bf16* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow(x.b));
}
MS_INLINE F load(const bf16* p, int n) {
    bf16 copy[16] = {};
    for (int i = 0; i < n; i++) copy[i] = p[i];
    return load(copy);
}
MS_INLINE void store(bf16* p, F x, int n) {
    bf16 copy[16];
    store(copy, x);
    for (int i = 0; i < n; i++) p[i] = copy[i];
}

MS_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
MS_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
MS_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
MS_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
MS_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
MS_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
MS_INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
MS_INLINE F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
MS_INLINE F if_less(F x, F bound, F y, F z) {
    return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, bound.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, bound.b, _CMP_LT_OQ))};
}
MS_INLINE __m256 pow2(__m256 n) {  // 2^n for whole n of -126 .. 127
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
MS_INLINE F scale_pow2(F x, F n) { return {_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))}; }
MS_INLINE F within_exponents(F x) {  // what scale_pow2 can take; a NaN stays one
    x = if_less(x, set1(-126.0f), set1(-126.0f), x);
    return if_less(set1(127.0f), x, set1(127.0f), x);
}
MS_INLINE float sum(F x) {
    __m256 y = _mm256_add_ps(x.a, x.b);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
MS_INLINE float maximum(F x) {
    __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
MS_INLINE float first(F x) { return _mm256_cvtss_f32(x.a); }

MS_INLINE W load_words(const void* p) {
    return {_mm256_loadu_si256(static_cast<const __m256i*>(p)), _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1)};
}
MS_INLINE W set1_word(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
MS_INLINE W spread(const void* p) {  // the word at p, in every lane
    int x;
    __builtin_memcpy(&x, p, 4);
    return set1_word(x);
}
MS_INLINE W spread_low_half(const void* p) {  // the half word at p in every lane's low half
    std::uint16_t x;
    __builtin_memcpy(&x, p, 2);
    return set1_word(x);
}
MS_INLINE W and_words(W x, int mask) {
    __m256i m = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
MS_INLINE W low_halves(W x) { return and_words(x, 0xffff); }
MS_INLINE F as_floats(W x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }

// acc + the products of each word's elements, in a fixed order
MS_INLINE F dot(const float*, F acc, W x, W y) { return fma(as_floats(x), as_floats(y), acc); }
MS_INLINE W shift_up(W x) { return {_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)}; }
MS_INLINE F dot(const bf16*, F acc, W x, W y) {
    const int high = static_cast<int>(0xffff0000);
    acc = fma(as_floats(and_words(x, high)), as_floats(and_words(y, high)), acc);
    return fma(as_floats(shift_up(x)), as_floats(shift_up(y)), acc);
}
MS_INLINE __m256i dot_bytes_half(__m256i acc, __m256i weight, __m256i x) {
    __m256i low = _mm256_and_si256(weight, _mm256_set1_epi16(0xff));
    __m256i even = _mm256_madd_epi16(low, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weight, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// integer accumulators: u8 weights times s8 activations, exact (vpmaddubsw would saturate)
MS_INLINE W dot_bytes(W acc, W weight, W x) {
    return {dot_bytes_half(acc.a, weight.a, x.a), dot_bytes_half(acc.b, weight.b, x.b)};
}
MS_INLINE F to_floats(W x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
MS_INLINE W add_words(W x, W y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
MS_INLINE W to_words(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // to nearest
MS_INLINE void store_words(void* p, W x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
MS_INLINE int sum_words(W x) {
    int lanes[16], total = 0;
    store_words(lanes, x);
    for (int lane : lanes) total += lane;
    return total;
}
MS_INLINE void store_bytes(std::int8_t* p, W x) {
    int lanes[16];
    store_words(lanes, x);
    for (int i = 0; i < 16; i++) {
        p[i] = static_cast<std::int8_t>(lanes[i] > 127 ? 127 : lanes[i] < -128 ? -128 : lanes[i]);
    }
}

// 16 bf16 into the low (half 0) or high (half 1) halves of 16 words. Another thread may write the other halves now.
MS_INLINE void store_halves(std::uint32_t* p, const bf16* x, int half) {
    std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(p) + half;
    for (int i = 0; i < 16; i++) halves[2 * i] = x[i].bits;
}

MS_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace millstream::MS_LEVEL
