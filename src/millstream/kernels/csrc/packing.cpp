#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

void pack_floats(const PackArgs& a, const LinearWeight& shape, int panel, std::uint32_t* words) {
    const int column_words = shape.words_of_column();
    const std::size_t row_bytes = static_cast<std::size_t>(a.num_inputs) * (a.dtype == DType::f32 ? 4 : 2);
    const char* rows[kPanel];
    for (int c = 0; c < kPanel; c++) rows[c] = row_of(a, panel, c);
    for (int k = 0; k < column_words; k++) {
        const std::size_t n = std::min<std::size_t>(4, row_bytes - 4 * k);  // the last word may be half filled
        for (int c = 0; c < kPanel; c++) {
            std::uint32_t word = 0;
            if (rows[c]) std::memcpy(&word, rows[c] + 4 * k, n);
            words[k * kPanel + c] = word;
        }
    }
}

void pack_bytes(const PackArgs& a, const LinearWeight& shape, int panel, std::uint32_t* words, float* scales) {
    // missing columns and inputs are zeros: 128 as bytes
    std::fill(words, words + static_cast<std::size_t>(shape.words_of_column()) * kPanel, 0x80808080u);
    auto* bytes = reinterpret_cast<std::uint8_t*>(words);
    for (int c = 0; c < kPanel; c++) {
        const char* row = row_of(a, panel, c);
        scales[c] = 0.0f;
        if (!row) continue;
        float largest = 0.0f;
        for (int k = 0; k < a.num_inputs; k++) largest = std::max(largest, std::fabs(to_float(row, a.dtype, k)));
        if (!(largest > 0.0f)) continue;
        scales[c] = largest / 127.0f;
        for (int k = 0; k < a.num_inputs; k++) {
            const long q = std::lrint(to_float(row, a.dtype, k) * (127.0f / largest));
            bytes[static_cast<std::size_t>(k / 4) * kPanel * 4 + c * 4 + k % 4] = static_cast<std::uint8_t>(q + 128);
        }
    }
}

}  // namespace

void pack(const PackArgs& a, ThreadPool& pool) {
    const LinearWeight shape{a.type, a.num_inputs, a.num_outputs, a.up != nullptr, nullptr, nullptr, nullptr};
    const std::size_t panel_words = static_cast<std::size_t>(shape.words_of_column()) * kPanel;
    pool.run([&](Worker& w) {
        int begin, end;
        w.share(shape.num_panels(), begin, end);
        for (int p = begin; p < end; p++) {
            if (a.type == WeightType::int8) {
                pack_bytes(a, shape, p, a.words + p * panel_words, a.scales + p * kPanel);
            } else {
                pack_floats(a, shape, p, a.words + p * panel_words);
            }
        }
    });
}

std::size_t linear_shared_bytes(const LinearWeight& weight, Epilogue epilogue, int num_rows, int num_threads) {
    std::size_t bytes = 0, rows = static_cast<std::size_t>(num_rows);
    if (epilogue == Epilogue::argmax) bytes += 8 * rows * num_threads;
    if (weight.type == WeightType::int8) bytes += rows * (8 + (weight.num_inputs + kLanes - 1) / kLanes * kLanes);
    return bytes;
}

}  // namespace millstream
