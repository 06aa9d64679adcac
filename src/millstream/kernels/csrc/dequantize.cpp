#include "dequantize.h"

#include <cstring>

namespace millstream {
namespace {

using Byte = std::uint8_t;

constexpr int kShort = 32, kLong = 256;  // values in a block of the old types, and of the K types

float half(const Byte* at) {
    std::uint16_t h;
    std::memcpy(&h, at, 2);
    const std::uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    std::uint32_t bits;
    float x;
    if (exponent == 0) {  // fraction * 2^-24
        x = static_cast<float>(fraction) * 0x1p-24f;
        std::memcpy(&bits, &x, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
    }
    std::memcpy(&x, &bits, 4);
    return x;
}

// The 5th bits of 32 values.
std::uint32_t word(const Byte* at) {
    std::uint32_t bits;
    std::memcpy(&bits, at, 4);
    return bits;
}

// One block each; what is multiplied and added in which order is the gguf package's choice, and so are the bits.

void q4_0(const Byte* b, float* out) {
    const float d = half(b);
    for (int j = 0; j < 16; j++) {
        out[j] = static_cast<float>((b[2 + j] & 15) - 8) * d;
        out[j + 16] = static_cast<float>((b[2 + j] >> 4) - 8) * d;
    }
}

void q4_1(const Byte* b, float* out) {
    const float d = half(b), m = half(b + 2);
    for (int j = 0; j < 16; j++) {
        out[j] = static_cast<float>(b[4 + j] & 15) * d + m;
        out[j + 16] = static_cast<float>(b[4 + j] >> 4) * d + m;
    }
}

void q5_0(const Byte* b, float* out) {
    const float d = half(b);
    const std::uint32_t high = word(b + 2);
    for (int j = 0; j < 16; j++) {
        const int low = (b[6 + j] & 15) | ((high >> j & 1) << 4), up = (b[6 + j] >> 4) | ((high >> (j + 16) & 1) << 4);
        out[j] = static_cast<float>(low - 16) * d;
        out[j + 16] = static_cast<float>(up - 16) * d;
    }
}

void q5_1(const Byte* b, float* out) {
    const float d = half(b), m = half(b + 2);
    const std::uint32_t high = word(b + 4);
    for (int j = 0; j < 16; j++) {
        const int low = (b[8 + j] & 15) | ((high >> j & 1) << 4), up = (b[8 + j] >> 4) | ((high >> (j + 16) & 1) << 4);
        out[j] = static_cast<float>(low) * d + m;
        out[j + 16] = static_cast<float>(up) * d + m;
    }
}

void q8_0(const Byte* b, float* out) {
    const float d = half(b);
    for (int j = 0; j < kShort; j++) out[j] = static_cast<float>(static_cast<std::int8_t>(b[2 + j])) * d;
}

// Scale and minimum, of 6 bits each, of the eight groups of 32 in a block of Q4_K or Q5_K.
void scale_and_min(const Byte* b, int group, float& scale, float& min) {
    if (group < 4) {
        scale = b[group] & 63;
        min = b[group + 4] & 63;
    } else {
        scale = (b[group + 4] & 15) | (b[group - 4] >> 6 << 4);
        min = (b[group + 4] >> 4) | (b[group] >> 6 << 4);
    }
}

// `high`: the bytes that hold the values' 5th bits, or null.
void q45_k(const Byte* b, const Byte* high, const Byte* low, float* out) {
    const float d = half(b), dmin = half(b + 2);
    for (int group = 0; group < 8; group++) {
        float scale, min;
        scale_and_min(b + 4, group, scale, min);
        const float by = d * scale, less = dmin * min;
        const Byte* packed = low + group / 2 * 32;
        const int shift = group % 2 * 4;
        for (int j = 0; j < 32; j++) {
            int q = packed[j] >> shift & 15;
            if (high) q |= (high[j] >> group & 1) << 4;
            out[group * 32 + j] = by * static_cast<float>(q) - less;
        }
    }
}

void q4_k(const Byte* b, float* out) { q45_k(b, nullptr, b + 16, out); }
void q5_k(const Byte* b, float* out) { q45_k(b, b + 16, b + 48, out); }

void q6_k(const Byte* b, float* out) {
    const Byte *low = b, *high = b + 128, *scales = b + 192;
    const float d = half(b + 208);
    for (int group = 0; group < 16; group++) {
        // 128 values share 64 low bytes and 32 high ones; 32 of them are two groups
        const int part = group / 8, quarter = group % 8 / 2, offset = group % 2 * 16;
        const Byte* l = low + part * 64 + quarter % 2 * 32 + offset;
        const Byte* h = high + part * 32 + offset;
        const float by = d * static_cast<float>(static_cast<std::int8_t>(scales[group]));
        for (int j = 0; j < 16; j++) {
            const int q = (l[j] >> (quarter / 2 * 4) & 15) | ((h[j] >> (quarter * 2) & 3) << 4);
            out[group * 16 + j] = by * static_cast<float>(q - 32);
        }
    }
}

struct Kind {
    int type, num_values, num_bytes;
    void (*block)(const Byte*, float*);
};

constexpr Kind kKinds[] = {
    {2, kShort, 18, q4_0}, {3, kShort, 20, q4_1},  {6, kShort, 22, q5_0},  {7, kShort, 24, q5_1},
    {8, kShort, 34, q8_0}, {12, kLong, 144, q4_k}, {13, kLong, 176, q5_k}, {14, kLong, 210, q6_k},
};

std::uint16_t to_bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<std::uint16_t>(x == x ? rounded : 0x7fc0);
}

}  // namespace

bool dequantize(int type, DType dtype, std::size_t num_blocks, const void* data, void* out) {
    for (const Kind& kind : kKinds) {
        if (kind.type != type) continue;
        const Byte* block = static_cast<const Byte*>(data);
        for (std::size_t i = 0; i < num_blocks; i++, block += kind.num_bytes) {
            if (dtype == DType::f32) {
                kind.block(block, static_cast<float*>(out) + i * kind.num_values);
                continue;
            }
            float values[kLong];
            kind.block(block, values);
            auto* to = static_cast<std::uint16_t*>(out) + i * kind.num_values;
            for (int j = 0; j < kind.num_values; j++) to[j] = to_bf16(values[j]);
        }
        return true;
    }
    return false;
}

}  // namespace millstream
