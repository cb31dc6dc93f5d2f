// Plans an attention call: checks the batch, cuts it into items, runs them. How it is cut changes no result.
#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.h"
#include "parallel.h"

namespace kt {
namespace {

constexpr int kMaxTileRows = 256;
constexpr int64_t kMaxPartialFloats = 4 << 20;
constexpr int64_t kItemsPerThread = 16;  // enough pieces that the last ones even out
// What one thread does, for the decision whether threads are worth waking.
constexpr int64_t kProductsPerNanosecond = 20;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

struct AlignedFloats {
    struct Free {
        void operator()(void* at) const { ::operator delete(at, std::align_val_t{64}); }
    };
    std::unique_ptr<void, Free> memory;
    int64_t size = 0;

    uint8_t* reserve(int64_t bytes) {
        if (bytes > size) {
            memory.reset();
            size = 0;
            memory.reset(::operator new(static_cast<size_t>(bytes), std::align_val_t{64}));
            size = bytes;
        }
        return static_cast<uint8_t*>(memory.get());
    }
};

struct Work {
    Tile tile;
    int64_t products;  // per KV head
    int first_group, last_group;

    int groups() const { return last_group - first_group + 1; }
};

class Plan {
public:
    explicit Plan(const AttentionCall& call)
        : call_(call), batch_(*call.fresh.batch), per_kv_(call.num_heads / batch_.heads.num_kv_heads) {
        entry_logical_.resize(static_cast<size_t>(batch_.num_entries));
        for (int64_t s = 0; s < batch_.num_sequences; ++s) plan_sequence(static_cast<int32_t>(s));
        cut();
    }

    int64_t nanoseconds() const { return total_ * batch_.heads.num_kv_heads / kProductsPerNanosecond; }
    int max_rows() const { return max_rows_; }
    const std::vector<Item>& items() const { return items_; }
    const std::vector<Item>& merges() const { return merges_; }

private:
    void plan_sequence(int32_t sequence) {
        const int32_t first = batch_.entry_starts[sequence], last = batch_.entry_starts[sequence + 1];
        const int32_t query = batch_.query_starts[sequence];
        const int32_t num_queries = batch_.query_starts[sequence + 1] - query;
        const int32_t context = batch_.context_lens[sequence];
        if (first < 0 || last < first || last > batch_.num_entries || num_queries < 0 || query < 0 ||
            query + int64_t{num_queries} > batch_.num_tokens) {
            refuse("sequence " + std::to_string(sequence) + " names rows or entries behind the batch");
        }
        if (num_queries == 0) return;
        int64_t logical = 0;
        int32_t entry = first, seen = first;  // seen: first entry that the window of the current tile reaches
        for (int32_t e = first; e < last; ++e) {
            check_entry(e);
            entry_logical_[e] = static_cast<int32_t>(logical);
            logical += batch_.entries[e].rows;
        }
        if (logical < int64_t{context} + num_queries) {
            refuse("sequence " + std::to_string(sequence) + " has " + std::to_string(logical) + " rows for " +
                   std::to_string(context) + " + " + std::to_string(num_queries) + " tokens");
        }
        const int most = larger(1, smaller(kSpanTokens, kMaxTileRows / per_kv_));
        for (int32_t done = 0; done < num_queries;) {
            const int32_t at = context + done;
            while (end_of(entry) <= at) ++entry;
            const int32_t oldest = call_.window > 0 ? at - call_.window + 1 : 0;
            while (end_of(seen) <= oldest && seen < entry) ++seen;
            const int32_t count = smaller(smaller(end_of(entry) - at, num_queries - done), most);
            add_tile({sequence, query + done, count, at, seen, entry}, larger(oldest, 0));
            done += count;
        }
    }

    int32_t end_of(int32_t entry) const { return entry_logical_[entry] + batch_.entries[entry].rows; }

    void check_entry(int32_t e) const {
        const Entry& entry = batch_.entries[e];
        if (entry.first_row < 0 || entry.rows < 0 || entry.first_row + entry.rows > batch_.heads.block_tokens ||
            entry.block < -1 || entry.block >= batch_.num_blocks) {
            refuse("entry " + std::to_string(e) + " (block " + std::to_string(entry.block) + ", first row " +
                   std::to_string(entry.first_row) + ", rows " + std::to_string(entry.rows) + ") lies in no block");
        }
    }

    // Every entry before the own one needs a page; the own one needs rows as computed.
    void check_pages(const Tile& tile) const {
        const int column = call_.fresh.column;
        for (int32_t e = tile.first_entry; e < tile.own_entry; ++e) {
            const Entry& entry = batch_.entries[e];
            if (entry.block < 0 || entry.rows == 0) continue;
            const Page page = batch_.page(entry.block, column);
            if (page.address == nullptr || page.k_form == Form::absent || page.v_form == Form::absent) {
                refuse("block " + std::to_string(entry.block) + " is read but has no page");
            }
        }
        const Entry& own = batch_.entries[tile.own_entry];
        if (own.block < 0) refuse("the entry of a new token was released");
        const Page open = batch_.open_page(own.block, column);
        if (open.address != nullptr) {
            if (!open.both_full()) refuse("the open page of block " + std::to_string(own.block) + " is not full");
            return;
        }
        if (batch_.page(own.block, column).both_full()) return;
        if (entry_logical_[tile.own_entry] < batch_.context_lens[tile.sequence]) {
            refuse("block " + std::to_string(own.block) + " has no rows as computed");
        }
    }

    void add_tile(const Tile& tile, int32_t oldest) {
        // Tiles of one sequence see the same entries and more: only what is new has to be looked at.
        if (works_.empty() || works_.back().tile.sequence != tile.sequence ||
            works_.back().tile.own_entry != tile.own_entry) {
            Tile unchecked = tile;
            if (!works_.empty() && works_.back().tile.sequence == tile.sequence) {
                unchecked.first_entry = larger(tile.first_entry, works_.back().tile.own_entry);
            }
            check_pages(unchecked);
        }
        const int32_t start = batch_.entry_starts[tile.sequence];
        const int64_t rows = int64_t{tile.num_tokens} * per_kv_;
        const int64_t seen = int64_t{tile.logical} + tile.num_tokens - oldest;
        const int64_t products = rows * seen * (batch_.heads.k_size + batch_.heads.v_size);
        works_.push_back({tile, products, (tile.first_entry - start) / kEntriesPerPartial,
                          (tile.own_entry - start) / kEntriesPerPartial});
        max_rows_ = larger(max_rows_, static_cast<int>(rows));
        total_ += products;
    }

    // Whole tiles where there are many; group by group where few would leave threads idle.
    void cut() {
        std::stable_sort(works_.begin(), works_.end(),
                         [](const Work& a, const Work& b) { return a.products > b.products; });
        const Heads& heads = batch_.heads;
        fair_ = total_ * heads.num_kv_heads / (kItemsPerThread * larger(call_.fresh.num_threads, 1));
        std::vector<int64_t> offsets(works_.size(), -1);
        int64_t floats = 0;
        for (size_t i = 0; i < works_.size(); ++i) {
            const Work& work = works_[i];
            const int rows = work.tile.num_tokens * per_kv_;
            const int64_t needed = partial_floats(rows, heads.v_size) * heads.num_kv_heads * work.groups();
            if (call_.fresh.num_threads > 1 && work.groups() > 1 && work.products > fair_ &&
                floats + needed <= kMaxPartialFloats) {
                offsets[i] = floats;
                floats += needed;
            }
        }
        static thread_local AlignedFloats memory;
        auto* partials = reinterpret_cast<float*>(memory.reserve(floats * 4));
        for (size_t i = 0; i < works_.size(); ++i) {
            if (offsets[i] < 0) {
                add_whole(works_[i]);
            } else {
                add_split(works_[i], partials + offsets[i]);
            }
        }
    }

    Item item(const Work& work, int head, float* partials) const {
        return {&work.tile, entry_logical_.data(), head, work.first_group, work.last_group, partials};
    }

    void add_whole(const Work& work) {
        for (int head = 0; head < batch_.heads.num_kv_heads; ++head) items_.push_back(item(work, head, nullptr));
    }

    void add_split(const Work& work, float* partials) {
        const int num_heads = batch_.heads.num_kv_heads;
        const int64_t size = partial_floats(work.tile.num_tokens * per_kv_, batch_.heads.v_size);
        for (int head = 0; head < num_heads; ++head) {
            merges_.push_back(item(work, head, partials + size * work.groups() * head));
        }
        // Pieces of several groups: what a piece begins with (queries, first bytes) costs as much as half a group.
        const int step = larger<int>(1, static_cast<int>(fair_ * work.groups() / larger<int64_t>(work.products, 1)));
        for (int group = work.first_group; group <= work.last_group; group += step) {
            for (int head = 0; head < num_heads; ++head) {
                Item piece = item(work, head, partials + size * (work.groups() * head + group - work.first_group));
                piece.first_group = group;
                piece.last_group = smaller(group + step - 1, work.last_group);
                items_.push_back(piece);
            }
        }
    }

    const AttentionCall& call_;
    const Batch& batch_;
    const int per_kv_;
    std::vector<int32_t> entry_logical_;
    std::vector<Work> works_;
    std::vector<Item> items_, merges_;
    int64_t total_ = 0;
    int64_t fair_ = 0;  // products of one item, for an even share
    int max_rows_ = 0;
};

}  // namespace

void paged_attention(const Kernels& kernels, const AttentionCall& call) {
    const Plan plan(call);
    const int threads = thread_count(call.fresh.num_threads, plan.nanoseconds());
    const int64_t bytes = round_up(scratch_bytes(plan.max_rows(), call.fresh.batch->heads), 4096);
    static thread_local AlignedFloats memory;
    uint8_t* scratch = memory.reserve(bytes * threads);
    for_each(static_cast<int64_t>(plan.items().size()), threads, 1, [&](int64_t i, int thread) {
        kernels.attend(call, plan.items()[static_cast<size_t>(i)], scratch + bytes * thread);
    });
    for_each(static_cast<int64_t>(plan.merges().size()), threads, 1, [&](int64_t i, int thread) {
        kernels.merge(call, plan.merges()[static_cast<size_t>(i)], scratch + bytes * thread);
    });
}

}  // namespace kt
