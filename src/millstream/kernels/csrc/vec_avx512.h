// 16 floats and 16 words as AVX-512 registers. With AVX512_BF16 and VNNI the products of pairs and quads are one
// instruction each.
#pragma once

#include <immintrin.h>

#include "types.h"

#define MS_INLINE static inline __attribute__((always_inline))

namespace millstream::MS_LEVEL {

struct F {  // 16 floats
    __m512 v;
};
struct W {  // 16 words of 32 bits
    __m512i v;
};

constexpr int kLinearRows = 8;  // rows of a register tile; enough that two loads of weights feed 16 products
constexpr int kByteRows = 6;  // of a tile in int8, which has two sets of accumulators
constexpr int kQkRows = 8;
constexpr int kQkTiles = 16;  // accumulators of a tile of scores
constexpr int kPvRows = 6;
constexpr int kPvCols = 4;
#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;  // a matrix unit for bf16: tiles.h
#else
constexpr bool kHasTiles = false;
#endif

MS_INLINE __mmask16 first_lanes(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }

MS_INLINE F zero() { return {_mm512_setzero_ps()}; }
MS_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
MS_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
MS_INLINE F load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
MS_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
MS_INLINE void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }

MS_INLINE F widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
MS_INLINE __m256i narrow(F x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
    __m512i u = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    // rounding would carry a NaN's low bits into infinity
    __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
MS_INLINE F load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
MS_INLINE F load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
MS_INLINE void store(bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
MS_INLINE void store(bf16* p, F x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

MS_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
MS_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
MS_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
MS_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
MS_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MS_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
MS_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
MS_INLINE F round(F a) { return {_mm512_roundscale_ps(a.v, 8)}; }
MS_INLINE F if_less(F x, F bound, F a, F b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_LT_OQ), b.v, a.v)};
}
MS_INLINE F scale_pow2(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }  // x * 2^n, n whole
MS_INLINE F within_exponents(F x) { return x; }  // what scale_pow2 can take: anything
MS_INLINE float sum(F x) { return _mm512_reduce_add_ps(x.v); }
MS_INLINE float maximum(F x) { return _mm512_reduce_max_ps(x.v); }
MS_INLINE float first(F x) { return _mm512_cvtss_f32(x.v); }

MS_INLINE W load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
MS_INLINE W set1_word(int x) { return {_mm512_set1_epi32(x)}; }
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
MS_INLINE W low_halves(W x) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(0xffff))}; }
MS_INLINE F as_floats(W x) { return {_mm512_castsi512_ps(x.v)}; }

// acc + the products of each word's elements, in a fixed order
MS_INLINE F dot(const float*, F acc, W a, W b) { return fma(as_floats(a), as_floats(b), acc); }
MS_INLINE F dot(const bf16*, F acc, W a, W b) {
#if defined(__AVX512BF16__)
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    acc = fma(as_floats({_mm512_and_si512(a.v, high)}), as_floats({_mm512_and_si512(b.v, high)}), acc);
    return fma(as_floats({_mm512_slli_epi32(a.v, 16)}), as_floats({_mm512_slli_epi32(b.v, 16)}), acc);
#endif
}
// integer accumulators: u8 weights times s8 activations, exact
MS_INLINE W dot_bytes(W acc, W weight, W x) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(acc.v, weight.v, x.v)};
#else
    const __m512i low = _mm512_set1_epi16(0xff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(weight.v, low), _mm512_srai_epi16(_mm512_slli_epi16(x.v, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(weight.v, 8), _mm512_srai_epi16(x.v, 8));
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
#endif
}
MS_INLINE F to_floats(W x) { return {_mm512_cvtepi32_ps(x.v)}; }
MS_INLINE W add_words(W a, W b) { return {_mm512_add_epi32(a.v, b.v)}; }
MS_INLINE W to_words(F x) { return {_mm512_cvtps_epi32(x.v)}; }  // to nearest
MS_INLINE int sum_words(W x) { return _mm512_reduce_add_epi32(x.v); }
MS_INLINE void store_bytes(std::int8_t* p, W x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}
MS_INLINE void store_words(void* p, W x) { _mm512_storeu_si512(p, x.v); }

// 16 bf16 into the low (half 0) or high (half 1) halves of 16 words. Another thread may write the other halves now.
MS_INLINE void store_halves(std::uint32_t* p, const bf16* x, int half) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    if (half == 0) {
        _mm512_mask_storeu_epi16(p, 0x55555555u, wide);
    } else {
        _mm512_mask_storeu_epi16(p, 0xaaaaaaaau, _mm512_slli_epi32(wide, 16));
    }
}

MS_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace millstream::MS_LEVEL
