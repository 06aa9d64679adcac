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
    alignas(64) std::atomic<std::uint32_t> step_{0};
    alignas(64) std::atomic<std::uint32_t> num_sleeping_{0};
    alignas(64) Function function_ = nullptr;
    void* context_ = nullptr;
    bool is_quitting_ = false;
};

inline void Worker::barrier() {
    if (count > 1) pool->barrier(id);
}

}  // namespace millstream
