#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace millstream {
namespace {

float to_float(const void* row, DType dtype, int k) {
    if (dtype == DType::f32) return static_cast<const float*>(row)[k];
    std::uint32_t bits = static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(row)[k]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The row of weights that becomes packed column `column`, or null beyond the last.
const char* row_of(const PackArgs& a, int panel, int column) {
    const std::size_t row_bytes = static_cast<std::size_t>(a.num_inputs) * (a.dtype == DType::f32 ? 4 : 2);
    const void* source = a.weight;
    int n = panel * kPanel + column;
    if (a.up) {
        source = column < kLanes ? a.weight : a.up;
        n = panel * kLanes + column % kLanes;
    }
    return n < a.num_outputs ? static_cast<const char*>(source) + n * row_bytes : nullptr;
}

void pack_floats(const PackArgs& a, int panel, const char* zeros, std::uint32_t* words) {
    const std::size_t row_bytes = static_cast<std::size_t>(a.num_inputs) * (a.dtype == DType::f32 ? 4 : 2);
    const char* rows[kPanel];
    for (int c = 0; c < kPanel; c++) {
        rows[c] = row_of(a, panel, c);
        if (!rows[c]) rows[c] = zeros;
    }
    std::size_t byte = 0;
    for (; byte + 4 <= row_bytes; byte += 4, words += kPanel) {
        for (int c = 0; c < kPanel; c++) std::memcpy(&words[c], rows[c] + byte, 4);
    }
    if (byte == row_bytes) return;
    for (int c = 0; c < kPanel; c++) {  // the last word is half filled
        words[c] = 0;
        std::memcpy(&words[c], rows[c] + byte, 2);
    }
}

// One column of one group: 32 weights as u8 around 128, and their scale, rounded to bf16 before it is used.
void pack_group(const PackArgs& a, const char* row, int group, int column, std::uint32_t* words) {
    auto* scale = reinterpret_cast<std::uint16_t*>(words) + column;
    auto* bytes = reinterpret_cast<std::uint8_t*>(words + kPanel / 2) + column * 4;
    const int begin = group * kByteGroup, n = row ? std::min(kByteGroup, a.num_inputs - begin) : 0;
    float largest = 0.0f;
    for (int k = 0; k < n; k++) largest = std::max(largest, std::fabs(to_float(row, a.dtype, begin + k)));
    const float exact = largest / 127.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &exact, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    float rounded;
    std::memcpy(&rounded, &bits, 4);
    *scale = static_cast<std::uint16_t>(bits >> 16);
    for (int k = 0; k < kByteGroup; k++) {
        long q = k < n && rounded > 0.0f ? std::lrint(to_float(row, a.dtype, begin + k) / rounded) : 0;
        q = std::min(127l, std::max(-127l, q));
        bytes[k / 4 * kPanel * 4 + k % 4] = static_cast<std::uint8_t>(q + 128);
    }
}

}  // namespace

void pack(const PackArgs& a, ThreadPool& pool) {
    const LinearWeight shape{a.type, a.num_inputs, a.num_outputs, a.up != nullptr, nullptr, nullptr};
    const std::vector<char> zeros(static_cast<std::size_t>(a.num_inputs) * 4);  // a row beyond the last column
    pool.run([&](Worker& w) {
        int begin, end;
        w.share(shape.num_panels(), begin, end);
        for (int p = begin; p < end; p++) {
            std::uint32_t* words = a.words + p * shape.panel_words();
            if (a.type != WeightType::int8) {
                pack_floats(a, p, zeros.data(), words);
                continue;
            }
            for (int c = 0; c < kPanel; c++) {
                const char* row = row_of(a, p, c);
                for (int g = 0; g < shape.num_groups(); g++) pack_group(a, row, g, c, words + g * kByteGroupWords);
            }
        }
    });
}

std::size_t linear_shared_bytes(const LinearWeight& weight, Epilogue epilogue, int num_rows, int num_threads) {
    std::size_t bytes = 0, rows = static_cast<std::size_t>(num_rows);
    if (epilogue == Epilogue::argmax) bytes += 8 * rows * num_threads;
    if (weight.type == WeightType::int8) bytes += rows * weight.num_groups() * (8 + kByteGroup);
    return bytes;
}

}  // namespace millstream
