#include "runtime.h"

#include <stdexcept>
#include <string>

namespace millstream {
namespace {

const Kernels& kernels_of(Level level) {
    if (static_cast<int>(level) > static_cast<int>(best_level())) {
        throw std::invalid_argument(std::string("level is ") + kLevelNames[static_cast<int>(level)] +
                                    ": this processor has at most " + kLevelNames[static_cast<int>(best_level())]);
    }
    switch (level) {
#if defined(MILLSTREAM_AMX)
        case Level::amx:
            return kKernelsAmx;
#endif
#if defined(__x86_64__)
        case Level::avx512_bf16:
            return kKernelsAvx512Bf16;
        case Level::avx512:
            return kKernelsAvx512;
        case Level::avx2:
            return kKernelsAvx2;
#endif
        default:
            return kKernelsPortable;
    }
}

int checked_threads(int num_threads) {
    if (num_threads < 1 || num_threads > 1024) {
        throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + ": it must be from 1 to 1024");
    }
    return num_threads;
}

}  // namespace

Runtime::Runtime(Level level, int num_threads, bool is_pinned)
    : level_(level), kernels_(&kernels_of(level)), pool_(checked_threads(num_threads), is_pinned) {}

char* Runtime::shared(std::size_t bytes) {
    if (shared_.size() < bytes) shared_.resize(bytes);
    return shared_.data();
}

int Runtime::free_rows(DType dtype) const { return level_ == Level::amx && dtype == DType::bf16 ? 32 : 8; }

void Runtime::linear(LinearArgs args) {
    args.shared = shared(linear_shared_bytes(*args.weight, args.epilogue, args.num_rows, pool_.size()));
    pool_.run([&](Worker& w) { kernels_->linear(args, w); });
}

void Runtime::rms_norm(const NormArgs& args) {
    pool_.run([&](Worker& w) { kernels_->rms_norm(args, w); });
}

void Runtime::gather(const GatherArgs& args) {
    pool_.run([&](Worker& w) { kernels_->gather(args, w); });
}

void Runtime::rotary_and_cache(const RotaryArgs& args) {
    check_tables(*args.tables, *args.cache);
    pool_.run([&](Worker& w) { kernels_->rotary_and_cache(args, w); });
}

void Runtime::attention(AttentionArgs args) {
    check_tables(*args.tables, *args.cache);
    args.schedule = &scheduler_.build(*args.tables, args.num_heads, args.cache->num_kv_heads, args.cache->head_dim,
                                      args.window, pool_.size(), free_rows(args.cache->dtype));
    pool_.run([&](Worker& w) { kernels_->attention(args, w); });
}

namespace {

[[noreturn]] void refuse(const char* what, int index, std::int64_t value, std::int64_t limit) {
    throw std::invalid_argument(std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) +
                                ": the limit is " + std::to_string(limit));
}

}  // namespace

void check_tables(const StepTables& t, const KVCache& cache) {
    const std::int64_t num_slots = static_cast<std::int64_t>(cache.num_blocks) * cache.block_size;
    for (int i = 0; i < t.num_tokens; i++) {
        if (t.slots[i] >= num_slots) refuse("slot_mapping", i, t.slots[i], num_slots - 1);
    }
    if (t.query_start[0] != 0) refuse("query_start", 0, t.query_start[0], 0);
    if (t.query_start[t.num_requests] != t.num_tokens) {
        refuse("query_start", t.num_requests, t.query_start[t.num_requests], t.num_tokens);
    }
    for (int r = 0; r < t.num_requests; r++) {
        const int count = t.query_start[r + 1] - t.query_start[r], context_len = t.context_len[r];
        if (count < 0 || count > context_len) refuse("query_lens", r, count, context_len);
        const int num_blocks = (context_len + cache.block_size - 1) / cache.block_size;
        if (num_blocks > t.block_stride) refuse("context_len", r, context_len, t.block_stride * cache.block_size);
        const std::int32_t* table = t.block_table + static_cast<std::ptrdiff_t>(r) * t.block_stride;
        for (int b = 0; b < num_blocks; b++) {
            if (table[b] < 0 || table[b] >= cache.num_blocks) refuse("block_table", r, table[b], cache.num_blocks - 1);
        }
    }
}

}  // namespace millstream
