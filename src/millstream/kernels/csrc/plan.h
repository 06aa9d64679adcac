// A planned step: operations recorded once over fixed buffers, replayed in one call with the step's rows and tables.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "runtime.h"

namespace millstream {

class Plan {
  public:
    // Buffers hold up to `max_rows` rows; every operation runs on as many rows as `run` is given.
    Plan(Runtime& runtime, int max_rows);
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    // Recording: as the methods of Runtime, whose row counts and tables are those of the step instead.
    void linear(LinearArgs args) { ops_.emplace_back(args); }
    void rms_norm(const NormArgs& args);
    void gather(const GatherArgs& args) { ops_.emplace_back(args); }
    void rotary_and_cache(RotaryArgs args);
    void attention(AttentionArgs args);

    // Throws std::invalid_argument for more rows than `max_rows`, or tables that leave the cache.
    // With `ids`, a last linear operation gives the column of each row's largest result instead of the results.
    // With `seconds`, adds to it what each operation took.
    void run(int num_rows, const StepTables* tables, std::int32_t* ids, double* seconds);

    int num_ops() const { return static_cast<int>(ops_.size()); }
    const char* op_name(int index) const;

  private:
    using Args = std::variant<LinearArgs, NormArgs, GatherArgs, RotaryArgs, AttentionArgs>;
    struct Op {
        explicit Op(const Args& a) : args(a) {}
        Args args;
        int schedule = -1;
        int rows_per_row = 1;  // of a norm: heads of a token
    };
    struct Schedule {  // of all layers with the same heads and window
        int num_heads, num_kv_heads, head_dim, window;
        int free_rows;
        std::unique_ptr<AttentionScheduler> scheduler;
    };

    int schedule_of(const AttentionArgs& args);
    void prepare(int num_rows, std::int32_t* ids);
    void run_op(const Op& op, Worker& worker) const;

    Runtime& runtime_;
    int max_rows_;
    StepTables tables_{};
    std::vector<Op> ops_;
    std::vector<Schedule> schedules_;
    Epilogue last_epilogue_ = Epilogue::store;
};

}  // namespace millstream
