// Element types, and the arguments of every kernel: pointers and ints, no tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace millstream {

struct bf16 {
    std::uint16_t bits;
};

enum class DType : int { f32 = 0, bf16 = 1 };

// How a panel's 32-bit words are read: see linear.inl.
enum class WeightType : int { f32 = 0, bf16 = 1, int8 = 2 };

constexpr int kPanel = 32;    // output columns that lie together in a packed weight
constexpr int kLanes = 16;    // 32-bit lanes of a vector, at every level
constexpr int kSegment = 256; // keys reduced together by attention, at positions that are multiples of it

constexpr int kByteGroup = 32;  // inputs that share a scale in int8
constexpr int kByteGroupWords = kPanel / 2 + kByteGroup / 4 * kPanel;

// A packed linear layer. Panel p holds columns 32p .. 32p+31, of each the words k = 0, 1, ...: words[p][k][32].
// A word is one float, two bf16 of neighbouring k, or four u8 (weight / scale + 128) of neighbouring k. With int8 a
// group of 8 words of k comes after its scales: 32 bf16, one for each column.
struct LinearWeight {
    WeightType type;
    int num_inputs;             // K
    int num_outputs;            // N; of a gate/up weight the N of its result
    bool is_gate_up;            // a panel is 16 gate columns, then the 16 up columns of the same outputs
    const std::uint32_t* words;
    const float* bias;          // padded to whole panels, or null

    int num_panels() const {
        int columns = is_gate_up ? kLanes : kPanel;
        return (num_outputs + columns - 1) / columns;
    }
    int num_groups() const { return (num_inputs + kByteGroup - 1) / kByteGroup; }  // of int8
    std::size_t panel_words() const {
        if (type == WeightType::int8) return static_cast<std::size_t>(num_groups()) * kByteGroupWords;
        return static_cast<std::size_t>(type == WeightType::f32 ? num_inputs : (num_inputs + 1) / 2) * kPanel;
    }
};

enum class Epilogue : int { store = 0, add = 1, silu_mul = 2, store_f32 = 3, argmax = 4 };

struct LinearArgs {
    DType dtype;  // of x, residual and out (out is float with store_f32, and unused with argmax)
    Epilogue epilogue;
    const LinearWeight* weight;
    int num_rows;
    const void* x;         // [rows][x_stride]
    int x_stride;          // elements from one row to the next, here and below
    const void* residual;  // add: [rows][out_stride]; may be `out` itself
    void* out;             // [rows][out_stride]
    int out_stride;
    std::int32_t* ids;     // argmax: [rows]; the lowest column among equals
    char* shared;          // memory of linear_shared_bytes() that all threads see, or null where that is 0
    const LinearArgs* next; // whose weights are read next, to fetch them early; or null
};

struct NormArgs {
    DType dtype;
    int num_rows, width;
    float eps;
    const void* x;       // [rows][width]
    const void* weight;  // [width]
    void* out;           // [rows][width]
};

// Rows of a table: out[i] = table[ids[i]], each of `row_bytes`. Used for the embedding and to pick rows for logits.
struct GatherArgs {
    int num_rows;
    std::size_t row_bytes;
    int num_table_rows;  // an id outside gives a row of zeros
    const std::int32_t* ids;
    const void* table;
    void* out;
};

// The step's tables, as kernels.ops.StepTables describes them.
struct StepTables {
    int num_tokens, num_requests, block_stride;
    const std::int32_t* positions;
    const std::int32_t* slots;
    const std::int32_t* query_start;
    const std::int32_t* context_len;
    const std::int32_t* block_table;
};

// One layer's keys and values. Per block and kv head: K as words [head_dim / per_word][block_size], then V as words
// [block_size / per_word][head_dim]: both are B panels of the products they serve, in prefill and in decode.
struct KVCache {
    DType dtype;
    int block_size, num_kv_heads, head_dim;
    void* data;
    int num_blocks;

    std::size_t plane_bytes() const {
        return static_cast<std::size_t>(block_size) * head_dim * (dtype == DType::f32 ? 4 : 2);
    }
};

struct RotaryArgs {
    const StepTables* tables;
    const KVCache* cache;
    int num_heads;
    const void* qkv;       // [T][(H + 2G) * E]
    const float* cos_sin;  // [positions][E]: E/2 cosines, then E/2 sines
    int num_positions;
    const void* q_norm;    // [E] or null
    const void* k_norm;
    float eps;
    void* q;               // [T][H * E]
};

struct AttentionSchedule;

struct AttentionArgs {
    const StepTables* tables;
    const KVCache* cache;
    const AttentionSchedule* schedule;
    int num_heads;
    float scale;
    int window;  // 0: none
    const void* q;  // [T][H * E]
    void* out;      // [T][H * E]
};

constexpr int kSumBlock = 256;  // logits whose weights are summed together when a token is drawn

// Kernels of one level; each is called on every thread of the pool at once.
struct Worker;
struct Kernels {
    void (*linear)(const LinearArgs&, Worker&);
    void (*rms_norm)(const NormArgs&, Worker&);
    void (*gather)(const GatherArgs&, Worker&);
    void (*rotary_and_cache)(const RotaryArgs&, Worker&);
    void (*attention)(const AttentionArgs&, Worker&);

    // passes over one row, see sampling.inl
    float (*row_best)(const float*, int, int*);
    double (*row_weights)(const float*, int, float, float, double*);
    void (*weights_of)(const float*, int, float, float, float*);
    void (*group_maxima)(const float*, int, int, float*);
    int (*columns_from)(const float*, int, float, std::int32_t*);

    void (*read_memory)(const void*, std::size_t, Worker&);  // see ceiling.inl
    void (*multiply)(DType, int, Worker&);
};

extern const Kernels kKernelsPortable;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsAvx512Bf16;
extern const Kernels kKernelsAmx;

// Bytes of LinearArgs::shared that `num_rows` rows need with `num_threads` threads.
std::size_t linear_shared_bytes(const LinearWeight& weight, Epilogue epilogue, int num_rows, int num_threads);

}  // namespace millstream
