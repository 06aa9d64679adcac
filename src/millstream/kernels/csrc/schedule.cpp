#include "schedule.h"

#include <algorithm>
#include <cstdint>

namespace millstream {
namespace {

// What starting a segment costs, in tokens.
constexpr int kSegmentOverhead = 8;
// Turns for each thread where there is enough to do, and segments that a turn has at least.
constexpr int kTurnsPerThread = 8;
constexpr int kSegmentsPerTurn = 8;

std::int64_t segment_cost(const AttentionItem& item, int segment, int free_rows) {
    const int end = std::min((segment + 1) * kSegment, item.first_position + item.num_tokens);
    const std::int64_t tokens = end - segment * kSegment + kSegmentOverhead;
    return tokens * std::max(item.num_rows(), free_rows);
}

std::int64_t item_cost(const AttentionItem& item, int free_rows) {
    std::int64_t cost = 0;
    for (int s = item.segment_begin; s < item.segment_end; s++) cost += segment_cost(item, s, free_rows);
    return cost;
}

}  // namespace

const AttentionSchedule& AttentionScheduler::build(const StepTables& tables, int num_heads, int num_kv_heads,
                                                   int head_dim, int window, int num_threads, int free_rows) {
    items_.clear();
    for (int r = 0; r < tables.num_requests; r++) add_items(tables, r, num_heads, num_kv_heads, window);
    deal(head_dim, num_threads, free_rows);
    schedule_ = {items_.data(), parts_.data(), part_begin_.data(), static_cast<int>(part_begin_.size()) - 1,
                 cuts_.data(),  static_cast<int>(cuts_.size()), records_.data()};
    return schedule_;
}

void AttentionScheduler::add_items(const StepTables& tables, int request, int num_heads, int num_kv_heads, int window) {
    const int begin = tables.query_start[request], count = tables.query_start[request + 1] - begin;
    const int first_position = tables.context_len[request] - count;
    const int group = num_heads / num_kv_heads, heads = std::min(group, kTileRows);
    const int tokens = std::max(1, kTileRows / heads);
    for (int kv_head = 0; kv_head < num_kv_heads; kv_head++) {  // outermost: tiles of a kv head share keys and values
        for (int h = 0; h < group; h += heads) {
            for (int t = 0; t < count; t += tokens) {
                AttentionItem item{};
                item.request = request;
                item.first_token = begin + t;
                item.num_tokens = std::min(tokens, count - t);
                item.first_position = first_position + t;
                item.kv_head = kv_head;
                item.first_head = kv_head * group + h;
                item.num_heads = std::min(heads, group - h);
                const int oldest = window > 0 ? std::max(0, item.first_position - window + 1) : 0;
                item.segment_begin = oldest / kSegment;
                item.segment_end = (item.first_position + item.num_tokens - 1) / kSegment + 1;
                items_.push_back(item);
            }
        }
    }
}

// Turns get about equal shares of the cost: whole items, or long ones cut at segments. Where the cuts fall does not
// change a bit of the results.
void AttentionScheduler::deal(int head_dim, int num_threads, int free_rows) {
    parts_.clear();
    cuts_.clear();
    part_begin_.assign(1, 0);
    std::int64_t total = 0, done = 0;
    int num_segments = 0;
    for (const auto& item : items_) {
        total += item_cost(item, free_rows);
        num_segments += item.segment_end - item.segment_begin;
    }
    const int most = num_threads > 1 ? num_threads * kTurnsPerThread : 1;
    const int num_turns = std::max(num_threads, std::min(most, num_segments / kSegmentsPerTurn));
    std::ptrdiff_t records = 0;
    int turn = 0;
    for (int i = 0; i < static_cast<int>(items_.size()); i++) {
        const AttentionItem& item = items_[i];
        const std::size_t first_part = parts_.size();
        const std::int64_t whole = item_cost(item, free_rows);
        const int step = 2 * whole * num_turns <= total ? item.segment_end - item.segment_begin : 1;
        int begin = item.segment_begin;
        for (int s = item.segment_begin; s < item.segment_end; s += step) {
            const std::int64_t cost = step > 1 ? whole : segment_cost(item, s, free_rows);
            // it goes where its middle falls
            while (turn < num_turns - 1 && (done + cost / 2) * num_turns >= total * (turn + 1)) {
                if (s > begin) parts_.push_back({i, begin, s, -1});
                begin = s;
                part_begin_.push_back(static_cast<int>(parts_.size()));
                turn++;
            }
            done += cost;
        }
        parts_.push_back({i, begin, item.segment_end, -1});
        if (parts_.size() - first_part == 1) continue;
        AttentionCut cut{i, records, 0};
        for (std::size_t p = first_part; p < parts_.size(); p++) {
            AttentionPart& part = parts_[p];
            part.record = records;
            // the first part is folded in its turn; a later part can't be, as the fold starts at the first segment
            const int n = p == first_part ? 1 : part.segment_end - part.segment_begin;
            cut.num_records += n;
            records += n * record_floats(item, head_dim);
        }
        cuts_.push_back(cut);
    }
    part_begin_.resize(num_turns + 1, static_cast<int>(parts_.size()));
    if (static_cast<std::ptrdiff_t>(records_.size()) < records) records_.resize(records);
}

}  // namespace millstream
