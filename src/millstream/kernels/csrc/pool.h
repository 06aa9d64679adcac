// The engine's own threads: they spin inside a step (a barrier costs 0.1 us, a wake-up 20 us), and sleep between steps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace millstream {

class ThreadPool;

// What a kernel knows of the thread it runs on. Kernels share work by `id` of `count`.
struct Worker {
    int id;
    int count;
    char* scratch;  // kScratchBytes of this thread's own memory, 64-byte aligned
    ThreadPool* pool;

    void barrier();  // all workers of the running step have come this far

    // This worker's share [begin, end) of `n` units.
    void share(std::int64_t n, int& begin, int& end) const {
        begin = static_cast<int>(n * id / count);
        end = static_cast<int>(n * (id + 1) / count);
    }
};

// An operation's units, taken in turns as threads come to it: one that is held up, as something else has its core for a
// while, leaves its turns to the others. Every thread makes one for the same operation, and a barrier lies between two.
// (Inlined always: kernels of all levels use it, and the linker must not keep a copy of theirs for everyone.)
class Turns {
  public:
    [[gnu::always_inline]] Turns(Worker& w, int num_units, int units_per_turn);

    // The next turn's units [begin, end); false where nothing is left. The one after it is taken already.
    [[gnu::always_inline]] bool next(int& begin, int& end) {
        begin = next_ * units_per_turn_;
        if (begin >= num_units_) return false;
        end = begin + units_per_turn_ < num_units_ ? begin + units_per_turn_ : num_units_;
        next_ = taken_ ? taken_->fetch_add(1, std::memory_order_relaxed) : next_ + 1;
        return true;
    }

    [[gnu::always_inline]] int num_units() const { return num_units_; }

    // Where the turn after the last one given begins, `num_units` or more where there is none.
    [[gnu::always_inline]] int ahead() const { return next_ * units_per_turn_; }

    // Several turns for each thread, so that little is left to wait for; long enough to be read in one go.
    [[gnu::always_inline]] static int units_per_turn(int num_units, int num_threads) {
        constexpr int kTurnsPerThread = 8;
        const int units = num_units / (num_threads * kTurnsPerThread);
        return units > 1 ? units : 1;
    }

  private:
    int num_units_, units_per_turn_, next_;
    std::atomic<int>* taken_;
};

constexpr std::size_t kScratchBytes = 512 * 1024;

class ThreadPool {
  public:
    // `num_threads` includes the caller of `run`. With `is_pinned`, every thread, the caller's included, keeps to one
    // CPU of those the process may use (pinning only some of them lets two share a CPU).
    ThreadPool(int num_threads, bool is_pinned);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return num_threads_; }

    // Calls function(worker, context) once on every thread and returns when all have ended.
    using Function = void (*)(Worker&, void*);
    void run(Function function, void* context);

    template <class F>
    void run(F&& f) {
        run([](Worker& w, void* context) { (*static_cast<std::remove_reference_t<F>*>(context))(w); }, &f);
    }

    void barrier(int id);

    // How many turns are taken of the operation that thread `id` begins now.
    std::atomic<int>& begin_turns(int id);

  private:
    void work(int id);
    void wait_for_step(std::uint32_t seen);

    static constexpr int kMaxRounds = 10;  // of the barrier: up to 1,024 threads

    struct alignas(64) Flag {
        std::atomic<std::uint32_t> value{0};
    };
    struct alignas(64) PerThread {
        Flag arrived[kMaxRounds];  // written by the partner of each round, read by this thread
        std::uint32_t epoch = 0;   // barriers passed
        std::uint32_t num_turns = 0;  // operations that were taken in turns
        std::unique_ptr<char[]> memory;
        char* scratch = nullptr;
    };

    int num_threads_;
    bool is_pinned_;
    int num_rounds_ = 0;
    std::vector<int> cpus_;
    std::unique_ptr<PerThread[]> per_thread_;
    std::vector<std::thread> threads_;
    std::mutex run_mutex_;  // two Python threads may call in at once
    struct alignas(64) Taken {
        std::atomic<int> turns{0};
    };
    Taken taken_[2];  // of this operation, and of the one after it
    alignas(64) std::atomic<std::uint32_t> step_{0};
    alignas(64) std::atomic<std::uint32_t> num_sleeping_{0};
    alignas(64) Function function_ = nullptr;
    void* context_ = nullptr;
    bool is_quitting_ = false;
};

inline void Worker::barrier() {
    if (count > 1) pool->barrier(id);
}

inline Turns::Turns(Worker& w, int num_units, int units_per_turn)
    : num_units_(num_units), units_per_turn_(units_per_turn), next_(w.id),
      taken_(w.count > 1 ? &w.pool->begin_turns(w.id) : nullptr) {}

}  // namespace millstream
