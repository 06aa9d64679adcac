#include "plan.h"

#include <chrono>
#include <stdexcept>
#include <string>

namespace millstream {

Plan::Plan(Runtime& runtime, int max_rows) : runtime_(runtime), max_rows_(max_rows) {}

void Plan::rms_norm(const NormArgs& args) {
    Op op(args);
    op.rows_per_row = args.num_rows / max_rows_;
    ops_.push_back(op);
}

void Plan::rotary_and_cache(RotaryArgs args) {
    args.tables = &tables_;
    ops_.emplace_back(args);
}

void Plan::attention(AttentionArgs args) {
    args.tables = &tables_;
    Op op(args);
    op.schedule = schedule_of(args);
    ops_.push_back(op);
}

int Plan::schedule_of(const AttentionArgs& a) {
    const KVCache& c = *a.cache;
    for (std::size_t i = 0; i < schedules_.size(); i++) {
        const Schedule& s = schedules_[i];
        if (s.num_heads == a.num_heads && s.num_kv_heads == c.num_kv_heads && s.head_dim == c.head_dim &&
            s.window == a.window) {
            return static_cast<int>(i);
        }
    }
    schedules_.push_back({a.num_heads, c.num_kv_heads, c.head_dim, a.window, runtime_.free_rows(c.dtype),
                          std::make_unique<AttentionScheduler>()});
    return static_cast<int>(schedules_.size()) - 1;
}

void Plan::run(int num_rows, const StepTables* tables, std::int32_t* ids, double* seconds) {
    if (num_rows < 0 || num_rows > max_rows_) {
        throw std::invalid_argument("the step has " + std::to_string(num_rows) + " rows: the plan holds " +
                                    std::to_string(max_rows_));
    }
    if (num_rows == 0) return;
    tables_ = tables ? *tables : StepTables{};
    const KVCache* checked = nullptr;
    for (const Op& op : ops_) {
        const auto* a = std::get_if<AttentionArgs>(&op.args);
        if (!a) continue;
        if (!tables || tables->num_tokens != num_rows) throw std::invalid_argument("the step's tables have other rows");
        // caches of equal size need one check; the layers of a model have that
        const bool is_alike = checked && checked->num_blocks == a->cache->num_blocks &&
                              checked->block_size == a->cache->block_size;
        if (!is_alike) check_tables(tables_, *a->cache);
        checked = a->cache;
    }
    const int num_threads = runtime_.pool().size();
    for (const Schedule& s : schedules_) {
        s.scheduler->build(tables_, s.num_heads, s.num_kv_heads, s.head_dim, s.window, num_threads, s.free_rows);
    }
    prepare(num_rows, ids);
    using Clock = std::chrono::steady_clock;
    runtime_.pool().run([&](Worker& w) {
        for (std::size_t i = 0; i < ops_.size(); i++) {
            const auto start = seconds ? Clock::now() : Clock::time_point{};
            run_op(ops_[i], w);
            w.barrier();
            if (seconds && w.id == 0) seconds[i] += std::chrono::duration<double>(Clock::now() - start).count();
        }
    });
    if (ids) std::get<LinearArgs>(ops_.back().args).epilogue = last_epilogue_;
}

// Sets what this step's operations need to know of it.
void Plan::prepare(int num_rows, std::int32_t* ids) {
    if (ids) {
        auto* last = ops_.empty() ? nullptr : std::get_if<LinearArgs>(&ops_.back().args);
        if (!last) throw std::invalid_argument("the plan does not end with a linear operation");
        last_epilogue_ = last->epilogue;
        last->epilogue = Epilogue::argmax;
        last->ids = ids;
    }
    std::size_t shared = 0;
    const LinearArgs* next = nullptr;
    for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
        if (auto* linear = std::get_if<LinearArgs>(&op->args)) {
            linear->num_rows = num_rows;
            linear->next = next;
            next = linear;
            const std::size_t bytes =
                linear_shared_bytes(*linear->weight, linear->epilogue, num_rows, runtime_.pool().size());
            shared = bytes > shared ? bytes : shared;
        } else if (auto* norm = std::get_if<NormArgs>(&op->args)) {
            norm->num_rows = num_rows * op->rows_per_row;
        } else if (auto* gather = std::get_if<GatherArgs>(&op->args)) {
            gather->num_rows = num_rows;
        } else if (auto* attention = std::get_if<AttentionArgs>(&op->args)) {
            attention->schedule = &schedules_[op->schedule].scheduler->schedule();
        }
    }
    char* memory = runtime_.shared(shared);
    for (Op& op : ops_) {
        if (auto* linear = std::get_if<LinearArgs>(&op.args)) linear->shared = memory;
    }
}

void Plan::run_op(const Op& op, Worker& w) const {
    const Kernels& k = runtime_.kernels();
    switch (op.args.index()) {
        case 0:
            return k.linear(*std::get_if<LinearArgs>(&op.args), w);
        case 1:
            return k.rms_norm(*std::get_if<NormArgs>(&op.args), w);
        case 2:
            return k.gather(*std::get_if<GatherArgs>(&op.args), w);
        case 3:
            return k.rotary_and_cache(*std::get_if<RotaryArgs>(&op.args), w);
        default:
            return k.attention(*std::get_if<AttentionArgs>(&op.args), w);
    }
}

const char* Plan::op_name(int index) const {
    constexpr const char* kNames[] = {"linear", "rms_norm", "gather", "rotary_and_cache", "attention"};
    return kNames[ops_.at(index).args.index()];
}

}  // namespace millstream
