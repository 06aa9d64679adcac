#include "pool.h"

#include <chrono>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace millstream {
namespace {

// Between steps a thread spins this long before it sleeps: Python prepares the next step in well under it.
constexpr std::chrono::microseconds kIdleSpin{200};
// Inside a step a thread spins this many times before it gives its core away, for when another process holds the
// core of the thread it waits for. About 50 us: far longer than any barrier of an undisturbed step.
constexpr int kBarrierSpins = 1000;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

std::vector<int> usable_cpus() {
    cpu_set_t set;
    std::vector<int> cpus;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int i = 0; i < CPU_SETSIZE; i++) {
            if (CPU_ISSET(i, &set)) cpus.push_back(i);
        }
    }
    return cpus;
}

void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}
#else
void sleep_while(std::atomic<std::uint32_t>&, std::uint32_t) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}
void wake_all(std::atomic<std::uint32_t>&) {}
std::vector<int> usable_cpus() { return {}; }
void pin(int) {}
#endif

}  // namespace

ThreadPool::ThreadPool(int num_threads, bool is_pinned)
    : num_threads_(num_threads), is_pinned_(is_pinned), cpus_(usable_cpus()), per_thread_(new PerThread[num_threads]) {
    taken_[0].turns = num_threads;
    while ((1 << num_rounds_) < num_threads) num_rounds_++;
    if (static_cast<int>(cpus_.size()) < num_threads) is_pinned_ = false;
    for (int i = 0; i < num_threads; i++) {
        per_thread_[i].memory.reset(new char[kScratchBytes + 64]());
        auto address = reinterpret_cast<std::uintptr_t>(per_thread_[i].memory.get());
        per_thread_[i].scratch = per_thread_[i].memory.get() + (64 - address % 64) % 64;
    }
    if (is_pinned_) pin(cpus_[0]);
    for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
    is_quitting_ = true;
    step_.fetch_add(1);
    wake_all(step_);
    for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(Function function, void* context) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    Worker worker{0, num_threads_, per_thread_[0].scratch, this};
    if (num_threads_ == 1) return function(worker, context);
    function_ = function;
    context_ = context;
    // seq_cst on both sides: either we see the sleeper, or it sees the new step and does not sleep
    step_.fetch_add(1);
    if (num_sleeping_.load() > 0) wake_all(step_);
    function(worker, context);
    barrier(0);
}

void ThreadPool::work(int id) {
    if (is_pinned_) pin(cpus_[id]);
    Worker worker{id, num_threads_, per_thread_[id].scratch, this};
    for (std::uint32_t seen = 0;; seen++) {
        wait_for_step(seen);
        if (is_quitting_) return;
        function_(worker, context_);
        barrier(id);
    }
}

void ThreadPool::wait_for_step(std::uint32_t seen) {
    auto now = std::chrono::steady_clock::now;
    auto end = now() + kIdleSpin;
    for (int i = 1; step_.load(std::memory_order_acquire) == seen; i++) {
        relax();
        if (i % 64 == 0 && now() > end) break;
    }
    while (step_.load(std::memory_order_acquire) == seen) {
        num_sleeping_.fetch_add(1);
        if (step_.load() == seen) sleep_while(step_, seen);
        num_sleeping_.fetch_sub(1);
    }
}

// Two counters are enough: all threads are done with the one of the operation before when the first begins this one.
// The first turns are the threads' own.
std::atomic<int>& ThreadPool::begin_turns(int id) {
    const std::uint32_t now = per_thread_[id].num_turns++ % 2;
    if (id == 0) taken_[1 - now].turns.store(num_threads_, std::memory_order_relaxed);
    return taken_[now].turns;
}

// Dissemination barrier: in round r thread i tells thread i + 2^r, so log2(n) messages on the longest path, and no
// line that all threads write.
void ThreadPool::barrier(int id) {
    PerThread& self = per_thread_[id];
    const std::uint32_t epoch = ++self.epoch;
    for (int r = 0; r < num_rounds_; r++) {
        per_thread_[(id + (1 << r)) % num_threads_].arrived[r].value.store(epoch, std::memory_order_release);
        auto& mine = self.arrived[r].value;
        for (int i = 1; static_cast<std::int32_t>(mine.load(std::memory_order_acquire) - epoch) < 0; i++) {
            if (i % kBarrierSpins == 0) {
                std::this_thread::yield();
            } else {
                relax();
            }
        }
    }
}

}  // namespace millstream
