// How one step's attention is cut into work for the threads. Built once for a step (and shape), used by every layer.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace millstream {

constexpr int kTileRows = 48;  // query rows (tokens x heads that share a kv head) that read keys and values together

// A tile of queries: some tokens of one request, the heads of one kv head.
struct AttentionItem {
    int request;
    int first_token, num_tokens;  // of the step's T
    int first_position;           // of first_token in its context
    int kv_head;
    int first_head, num_heads;    // of all query heads
    int segment_begin, segment_end;

    int num_rows() const { return num_tokens * num_heads; }
};

// What one turn has of an item. An item that lies between two turns is cut at a segment: each part leaves records
// (maximum, sum and weighted values of every row), which are merged in the order of the segments when all are there.
struct AttentionPart {
    int item;
    int segment_begin, segment_end;
    std::ptrdiff_t record;  // where in `records` its first record goes; -1: not cut, write the result
};

struct AttentionCut {
    int item;
    std::ptrdiff_t first_record;
    int num_records;
};

struct AttentionSchedule {
    const AttentionItem* items;
    const AttentionPart* parts;
    const int* part_begin;  // [turns + 1]
    int num_turns;
    const AttentionCut* cuts;
    int num_cuts;
    float* records;
};

inline std::ptrdiff_t record_floats(const AttentionItem& item, int head_dim) {
    return static_cast<std::ptrdiff_t>(item.num_rows()) * (head_dim + 2);
}

class AttentionScheduler {
  public:
    // The schedule stays valid until the next call. Up to `free_rows` rows an item costs what reading its keys and
    // values costs.
    const AttentionSchedule& build(const StepTables& tables, int num_heads, int num_kv_heads, int head_dim, int window,
                                   int num_threads, int free_rows);

    const AttentionSchedule& schedule() const { return schedule_; }  // what `build` made last

  private:
    void add_items(const StepTables& tables, int request, int num_heads, int num_kv_heads, int window);
    void deal(int head_dim, int num_threads, int free_rows);

    std::vector<AttentionItem> items_;
    std::vector<AttentionPart> parts_;
    std::vector<AttentionCut> cuts_;
    std::vector<int> part_begin_;
    std::vector<float> records_;
    AttentionSchedule schedule_{};
};

}  // namespace millstream
