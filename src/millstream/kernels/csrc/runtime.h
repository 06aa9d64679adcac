// The kernels of one level with the threads that run them: what Python holds.
#pragma once

#include <vector>

#include "cpu.h"
#include "pool.h"
#include "schedule.h"
#include "types.h"

namespace millstream {

class Runtime {
  public:
    // Throws std::invalid_argument for a level that this processor does not have, or no threads.
    Runtime(Level level, int num_threads, bool is_pinned);
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    Level level() const { return level_; }
    const Kernels& kernels() const { return *kernels_; }
    ThreadPool& pool() { return pool_; }
    AttentionScheduler& scheduler() { return scheduler_; }
    int free_rows(DType dtype) const;  // see AttentionScheduler::build

    // Memory that all threads of an operation see; it holds until the next call.
    char* shared(std::size_t bytes);

    void linear(LinearArgs args);
    void rms_norm(const NormArgs& args);
    void gather(const GatherArgs& args);
    void rotary_and_cache(const RotaryArgs& args);
    void attention(AttentionArgs args);

  private:
    Level level_;
    const Kernels* kernels_;
    ThreadPool pool_;
    AttentionScheduler scheduler_;
    std::vector<char> shared_;
};

// Throws std::invalid_argument where a table names a block or slot outside the cache, or lengths that do not fit:
// kernels trust what passed here.
void check_tables(const StepTables& tables, const KVCache& cache);

}  // namespace millstream
