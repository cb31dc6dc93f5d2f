// Attention of one tile of queries over the pages its sequence sees. One algorithm, over a policy V of operations.
//
// A tile is at most kTileTokens new tokens of one sequence that share their own block-table entry, times the query
// heads of one KV head; these are the rows. Blocks are the outer loop and groups of up to kMaxRows rows the inner one,
// so a block's bytes stay in the nearest cache while all rows use them.
//
// What a row computes never depends on the other rows: sums run in the order of tokens and channels, a token that a row
// may not see adds an exact zero, and a group's partial (m, l, acc) starts afresh every kEntriesPerPartial entries.
#pragma once

#include "calls.h"
#include "tiles.h"

namespace kt {
namespace {

// int16 codes stay within two signed 8-bit digits, so that an 8-bit dot product could take their place.
constexpr float kCodeLimit = 127 * 256;
constexpr float kTiny = 1e-30f;

struct Scratch {
    float *queries, *turned, *query_scales, *acc, *m, *l, *total, *total_m, *total_l, *keys, *values, *k_scales,
        *v_scales;
    int16_t* codes;
};

inline float* take(uint8_t*& at, int64_t floats) {
    auto* taken = reinterpret_cast<float*>(at);
    at += round_up(floats * 4, 64);
    return taken;
}

// Returns the bytes used; with at = nullptr only counts.
inline int64_t carve(uint8_t* at, int64_t rows, const Heads& heads, Scratch& s) {
    uint8_t* const start = at;
    const int dk = padded(heads.k_size), dv = padded(heads.v_size);
    s.queries = take(at, rows * dk);
    s.turned = take(at, rows * dk);
    s.codes = reinterpret_cast<int16_t*>(take(at, rows * dk / 2));
    s.query_scales = take(at, rows);
    s.acc = take(at, rows * dv);
    s.m = take(at, rows);
    s.l = take(at, rows);
    s.total = take(at, rows * dv);
    s.total_m = take(at, rows);
    s.total_l = take(at, rows);
    s.keys = take(at, int64_t{dk} * kSpanTokens);
    s.values = take(at, int64_t{dv} * kSpanTokens);
    s.k_scales = take(at, kSpanTokens);
    s.v_scales = take(at, kSpanTokens);
    return at - start;
}

// Up to kSpanTokens block rows of one entry, as one KV head sees them. Row 0 of a span is block row 64 * i.
struct Span {
    Section k, v;           // `rows` of a full form: row 0 of the span; of int8: its first tile
    int64_t k_stride, v_stride;  // elements between rows of a full form
    int lo, hi;             // rows [lo, hi) may be read
    int logical;            // logical index of row 0
    int shift;
    bool own;               // rows see only up to themselves
};

template <class V>
struct TileRun {
    using vf = typename V::vf;

    const AttentionCall& call;
    const Item& item;
    const Tile& tile;
    const Batch& batch;
    const Heads heads;
    const int heads_per_kv, rows, dk, dv;
    Scratch s;
    const float* turned = nullptr;  // the queries in use: turned back by `shift`
    int shift = 0;
    bool coded = false;

    TileRun(const AttentionCall& c, const Item& i, uint8_t* scratch)
        : call(c),
          item(i),
          tile(*i.tile),
          batch(*c.fresh.batch),
          heads(batch.heads),
          heads_per_kv(c.num_heads / heads.num_kv_heads),
          rows(tile.num_tokens * heads_per_kv),
          dk(padded(heads.k_size)),
          dv(padded(heads.v_size)) {
        carve(scratch, rows, heads, s);
    }

    int logical_of(int row) const { return tile.logical + row / heads_per_kv; }

    // ---- queries

    void load_queries() {
        for (int r = 0; r < rows; ++r) {
            const int head = item.head * heads_per_kv + r % heads_per_kv;
            const void* from = call.q.at(tile.first_token + r / heads_per_kv, head, call.fresh.form);
            load_row<V>(call.fresh.form, from, heads.k_size, s.queries + r * dk);
        }
        turned = s.queries;
    }

    // R(-shift) q: keys were rotated `shift` positions before the place they are read at.
    void turn_queries(int new_shift) {
        shift = new_shift;
        coded = false;
        const Rope& rope = call.rope;
        if (shift == 0 || rope.half == 0) {
            turned = s.queries;
            return;
        }
        int at = 0;
        while (rope.shifts[at] != shift) ++at;
        const float* cosines = rope.cosines + int64_t{at} * rope.half;
        const float* sines = rope.sines + int64_t{at} * rope.half;
        const int step = rope.interleaved ? 2 : 1, apart = rope.interleaved ? 1 : rope.half;
        for (int r = 0; r < rows; ++r) {
            const float* from = s.queries + r * dk;
            float* to = s.turned + r * dk;
            for (int c = 0; c < dk; ++c) to[c] = from[c];
            for (int i = 0; i < rope.half; ++i) {
                const float x = from[i * step], y = from[i * step + apart];
                to[i * step] = x * cosines[i] + y * sines[i];
                to[i * step + apart] = y * cosines[i] - x * sines[i];
            }
        }
        turned = s.turned;
    }

    void code_queries() {
        for (int r = 0; r < rows; ++r) {
            const float* row = turned + r * dk;
            const float most = largest_magnitude<V>(row, heads.k_size);
            const bool codable = most > kTiny && most < __builtin_inff();
            const vf inverse = V::set1(codable ? kCodeLimit / most : 0.0f);
            for (int c = 0; c < dk; c += V::W) {
                V::store_int16(s.codes + r * dk + c, V::to_int(V::mul(V::load(row + c), inverse)));
            }
            // An infinite or NaN query has scale NaN, and so have its scores.
            s.query_scales[r] = codable ? most / kCodeLimit * call.scale : most * 0.0f;
        }
        coded = true;
    }

    // ---- spans

    Span span_of(int entry_index, int part) const {
        const Entry& entry = batch.entries[entry_index];
        const bool own = entry_index == tile.own_entry;
        const int entry_logical = item.entry_logical[entry_index];
        Span span{};
        span.own = own;
        span.shift = entry.shift;
        span.logical = entry_logical - entry.first_row + part * kSpanTokens;
        const int last = tile.logical + tile.num_tokens;  // one past the newest query
        int lo = entry.first_row, hi = entry.first_row + entry.rows;
        if (own) hi = smaller(hi, last - entry_logical + entry.first_row);
        if (call.window > 0) lo = larger(lo, tile.logical - call.window + 1 - entry_logical + entry.first_row);
        span.lo = larger(lo - part * kSpanTokens, 0);
        span.hi = smaller(hi - part * kSpanTokens, kSpanTokens);
        if (span.lo < span.hi) find_rows(entry, own, part, span);
        return span;
    }

    void find_rows(const Entry& entry, bool own, int part, Span& span) const {
        const NewRows& fresh = call.fresh;
        span.k_stride = heads.k_size;
        span.v_stride = heads.v_size;
        Page page = batch.page(entry.block, fresh.column);
        if (own) {
            const Page open = batch.open_page(entry.block, fresh.column);
            if (open.address != nullptr) page = open;
            if (!page.both_full()) {
                const int64_t row = batch.query_starts[tile.sequence] + span.logical -
                                    batch.context_lens[tile.sequence];  // may be negative before `lo`
                span.k = {fresh.k.at(row, item.head, fresh.form), nullptr, fresh.form};
                span.v = {fresh.v.at(row, item.head, fresh.form), nullptr, fresh.form};
                span.k_stride = fresh.k.token_stride;
                span.v_stride = fresh.v.token_stride;
                return;
            }
        }
        span.k = k_section(page, heads, item.head);
        span.v = v_section(page, heads, item.head);
        const int64_t skipped = int64_t{part} * kSpanTokens;
        span.k.rows += skipped * heads.k_size * element_bytes(span.k.form);
        span.v.rows += skipped * heads.v_size * element_bytes(span.v.form);
        if (span.k.scales != nullptr) span.k.scales += skipped;
        if (span.v.scales != nullptr) span.v.scales += skipped;
    }

    // Scales of rows [lo, hi) as float; zero elsewhere, where memory may hold anything.
    void load_scales(const Section& section, const Span& span, float* to) const {
        for (int t = 0; t < kSpanTokens; t += V::W) {
            if (t + V::W <= heads.block_tokens && section.form == Form::int8) {
                V::store(to + t, V::load(reinterpret_cast<const fp16*>(section.scales + t)));
            } else {
                V::store(to + t, V::set1(1.0f));
            }
        }
        for (int t = 0; t < span.lo; ++t) to[t] = 0.0f;
        for (int t = span.hi; t < kSpanTokens; ++t) to[t] = 0.0f;
    }

    // keys[channel][row], so that a score needs no horizontal sum.
    void transpose_keys(const Span& span) const {
        with_form(span.k.form, span.k.rows, [&](auto* base) {
            for (int t = span.lo & ~7; t < span.hi; t += 8) {
                decltype(base) eight[8];
                for (int i = 0; i < 8; ++i) {
                    eight[i] = base + smaller(larger(t + i, span.lo), span.hi - 1) * span.k_stride;
                }
                for (int c = 0; c < heads.k_size; c += 8) {
                    V::transpose8(eight, c, s.keys + c * kSpanTokens + t, kSpanTokens);
                }
            }
        });
    }

    // Rows of V as padded floats; `stride` is the distance between them. fp32 rows are read where they lie.
    const float* float_values(const Span& span, int64_t& stride) const {
        if (span.v.form == Form::fp32 && heads.v_size == dv) {
            stride = span.v_stride;
            return reinterpret_cast<const float*>(span.v.rows);
        }
        with_form(span.v.form, span.v.rows, [&](auto* base) {
            for (int t = span.lo; t < span.hi; ++t) {
                load_row<V>(base + t * span.v_stride, heads.v_size, s.values + t * dv);
            }
        });
        stride = dv;
        return s.values;
    }

    // ---- one span against all rows

    void attend_span(const Span& span, const Span& next) {
        if (span.shift != shift) turn_queries(span.shift);
        if (span.k.form == Form::int8) {
            if (!coded) code_queries();
        } else {
            transpose_keys(span);
        }
        load_scales(span.k, span, s.k_scales);
        load_scales(span.v, span, s.v_scales);
        int64_t value_stride = 0;
        const float* values = span.v.form == Form::int8 ? nullptr : float_values(span, value_stride);
        const int tiles = (rows + kMaxRows - 1) / kMaxRows;
        for (int i = 0; i < tiles; ++i) {
            const int first = static_cast<int>(int64_t{rows} * i / tiles);
            const int count = static_cast<int>(int64_t{rows} * (i + 1) / tiles) - first;
            with_rows(count, [&](auto n) {
                attend_rows<decltype(n)::value>(span, next, first, values, value_stride);
            });
        }
    }

    template <int NR>
    void attend_rows(const Span& span, const Span& next, int first, const float* values, int64_t value_stride) {
        int lo[NR], hi[NR], least = kSpanTokens, most = 0;
        for (int r = 0; r < NR; ++r) {
            const int at = logical_of(first + r) - span.logical;
            lo[r] = call.window > 0 ? larger(span.lo, at - call.window + 1) : span.lo;
            hi[r] = span.own ? smaller(span.hi, at + 1) : span.hi;
            if (lo[r] < hi[r]) {
                least = smaller(least, lo[r]);
                most = larger(most, hi[r]);
            }
        }
        if (least >= most) return;
        const int begin = least & ~15, end = (most + 15) & ~15;
        alignas(64) float scores[NR][kSpanTokens];
        alignas(64) int16_t codes[NR][kSpanTokens];
        float factor[NR], value_scale[NR];
        if (span.k.form == Form::int8) {
            int8_scores<NR>(span, next, first, begin, end, scores);
        } else {
            float_scores<NR>(first, begin, end, scores);
        }
        for (int r = 0; r < NR; ++r) {
            const float scale = span.k.form == Form::int8 ? s.query_scales[first + r] : call.scale;
            factor[r] = softmax(scores[r], scale, begin, end, lo[r], hi[r], first + r);
            if (span.v.form == Form::int8) value_scale[r] = code_weights(scores[r], codes[r], begin, end);
        }
        float* acc = s.acc + first * dv;
        if (span.v.form == Form::int8) {
            int8_values<NR>(span, next, first, codes[0], begin, end, factor, value_scale, acc);
        } else {
            float_values_sum<NR>(values + least * value_stride, value_stride, scores[0] + least, most - least, factor,
                                 acc);
        }
    }

    template <int NR>
    void int8_scores(const Span& span, const Span& next, int first, int begin, int end,
                     float (*scores)[kSpanTokens]) const {
        const auto* keys = reinterpret_cast<const int8_t*>(span.k.rows);
        const int16_t* codes = s.codes + first * dk;
        const int64_t ahead = next.k.rows - span.k.rows;
        const bool fetch = first == 0 && next.k.form == Form::int8;
        for (int t = begin; t < end; t += V::W) {
            const int8_t* at = keys + int64_t{t & ~15} * heads.k_size + (t & 15) * kTileDepth;
            const auto done = [&](int r, vf sum) { V::store(scores[r] + t, sum); };
            constexpr int64_t stride = kKeyTileTokens * kTileDepth;
            if (fetch && (t & 15) == 0) {
                int8_tile<V, NR, true>(codes, dk, at, stride, heads.k_size / kTileDepth, ahead, done);
            } else {
                int8_tile<V, NR, false>(codes, dk, at, stride, heads.k_size / kTileDepth, 0, done);
            }
        }
    }

    template <int NR>
    void float_scores(int first, int begin, int end, float (*scores)[kSpanTokens]) const {
        const float* queries = turned + first * dk;
        const auto zero = [](int, int) { return V::set1(0.0f); };
        int t = begin;
        const auto done = [&](int r, int lane, vf sum) { V::store(scores[r] + t + lane, sum); };
        for (; t + 2 * V::W <= end; t += 2 * V::W) {
            float_tile<V, NR, 2>(queries, dk, s.keys + t, kSpanTokens, heads.k_size, zero, done);
        }
        for (; t < end; t += V::W) {
            float_tile<V, NR, 1>(queries, dk, s.keys + t, kSpanTokens, heads.k_size, zero, done);
        }
    }

    // Scores become weights exp(score - m) in place. Returns what the row's earlier sums must be multiplied with.
    float softmax(float* scores, float scale, int begin, int end, int lo, int hi, int row) const {
        const vf row_scale = V::set1(scale);
        vf top = V::set1(kMinusInfinity);
        const bool whole = lo <= begin && hi >= end;
        for (int t = begin; t < end; t += V::W) {
            vf score = V::mul(V::load(scores + t), V::mul(row_scale, V::load(s.k_scales + t)));
            if (call.softcap > 0) {
                const vf cap = V::set1(call.softcap);
                score = V::mul(cap, tanh<V>(V::div(score, cap)));
            }
            if (!whole) {
                const vf at = V::add(V::iota(), V::set1(static_cast<float>(t)));
                score = V::select(V::less(at, V::set1(static_cast<float>(lo))), V::set1(kMinusInfinity), score);
                score = V::select(V::less(at, V::set1(static_cast<float>(hi))), score, V::set1(kMinusInfinity));
            }
            V::store(scores + t, score);
            top = V::max(score, top);
        }
        const float before = s.m[row], now = larger(before, V::reduce_max(top));
        const float base = now == kMinusInfinity ? 0.0f : now;
        vf sum = V::set1(0.0f);
        for (int t = begin; t < end; t += V::W) {
            const vf weight = exp<V>(V::sub(V::load(scores + t), V::set1(base)));
            V::store(scores + t, weight);
            sum = V::add(sum, weight);
        }
        const float factor = before == now ? 1.0f : exp_one<V>(before - base);
        s.m[row] = now;
        s.l[row] = s.l[row] * factor + V::reduce_add(sum);
        return factor;
    }

    // Weights times value scales as int16; returns the scale of the codes.
    float code_weights(float* weights, int16_t* codes, int begin, int end) const {
        vf most = V::set1(0.0f);
        for (int t = begin; t < end; t += V::W) {
            const vf product = V::mul(V::load(weights + t), V::load(s.v_scales + t));
            V::store(weights + t, product);
            most = V::max(product, most);
        }
        const float top = V::reduce_max(most);
        const vf inverse = V::set1(top > kTiny ? kCodeLimit / top : 0.0f);
        for (int t = begin; t < end; t += V::W) {
            V::store_int16(codes + t, V::to_int(V::mul(V::load(weights + t), inverse)));
        }
        return top > kTiny ? top / kCodeLimit : 0.0f;
    }

    template <int NR>
    void int8_values(const Span& span, const Span& next, int first, const int16_t* codes, int begin, int end,
                     const float* factor, const float* scale, float* acc) const {
        const int64_t stride = int64_t{heads.v_size} * kTileDepth;
        const auto* values = reinterpret_cast<const int8_t*>(span.v.rows) + begin / kTileDepth * stride;
        const int64_t ahead = next.v.rows - span.v.rows;
        const bool fetch = first == 0 && next.v.form == Form::int8;
        for (int c = 0; c < heads.v_size; c += V::W) {
            const auto done = [&](int r, vf sum) {
                float* to = acc + r * dv + c;
                V::store(to, V::fma(sum, V::set1(scale[r]), V::mul(V::load(to), V::set1(factor[r]))));
            };
            const int8_t* at = values + c * kTileDepth;
            const int groups = (end - begin) / kTileDepth;
            if (fetch && (c & 15) == 0) {
                int8_tile<V, NR, true>(codes + begin, kSpanTokens, at, stride, groups, ahead, done);
            } else {
                int8_tile<V, NR, false>(codes + begin, kSpanTokens, at, stride, groups, 0, done);
            }
        }
    }

    template <int NR>
    void float_values_sum(const float* values, int64_t stride, const float* weights, int tokens, const float* factor,
                          float* acc) const {
        int c = 0;
        const auto init = [&](int r, int lane) {
            return V::mul(V::load(acc + r * dv + c + lane), V::set1(factor[r]));
        };
        const auto done = [&](int r, int lane, vf sum) { V::store(acc + r * dv + c + lane, sum); };
        for (; c + 2 * V::W <= dv; c += 2 * V::W) {
            float_tile<V, NR, 2>(weights, kSpanTokens, values + c, stride, tokens, init, done);
        }
        for (; c < dv; c += V::W) {
            float_tile<V, NR, 1>(weights, kSpanTokens, values + c, stride, tokens, init, done);
        }
    }

    // ---- partial groups

    void attend_group(int group) {
        for (int r = 0; r < rows; ++r) {
            s.m[r] = kMinusInfinity;
            s.l[r] = 0.0f;
        }
        for (int64_t i = 0; i < int64_t{rows} * dv; ++i) s.acc[i] = 0.0f;
        const int start = batch.entry_starts[tile.sequence] + group * kEntriesPerPartial;
        const int first = larger(start, tile.first_entry);
        const int last = smaller(start + kEntriesPerPartial - 1, tile.own_entry);
        Span waiting{};  // worked on when the next one is known, so that its bytes can be called for meanwhile
        for (int e = first; e <= last; ++e) {
            const Entry& entry = batch.entries[e];
            if (entry.block < 0) continue;
            const int parts = (entry.first_row + entry.rows + kSpanTokens - 1) / kSpanTokens;
            for (int part = entry.first_row / kSpanTokens; part < parts; ++part) {
                const Span span = span_of(e, part);
                if (span.lo >= span.hi) continue;
                if (waiting.lo < waiting.hi) attend_span(waiting, span);
                waiting = span;
            }
        }
        if (waiting.lo < waiting.hi) attend_span(waiting, Span{});
    }

    // total += partial, in the fixed order of groups.
    void merge_row(int row, float m, float l, const float* acc) {
        if (m == kMinusInfinity && !(l != l)) return;
        const float before = s.total_m[row], now = larger(before, m);
        const float keep = before == kMinusInfinity ? 0.0f : exp_one<V>(before - now);
        const float share = exp_one<V>(m == kMinusInfinity ? 0.0f : m - now);
        s.total_m[row] = now;
        s.total_l[row] = s.total_l[row] * keep + l * share;
        float* to = s.total + row * dv;
        for (int c = 0; c < dv; c += V::W) {
            V::store(to + c, V::fma(V::load(acc + c), V::set1(share), V::mul(V::load(to + c), V::set1(keep))));
        }
    }

    void clear_total() {
        for (int r = 0; r < rows; ++r) {
            s.total_m[r] = kMinusInfinity;
            s.total_l[r] = 0.0f;
        }
        for (int64_t i = 0; i < int64_t{rows} * dv; ++i) s.total[i] = 0.0f;
    }

    void write_output() {
        for (int i = 0; i < dv; ++i) s.acc[i] = 0.0f;  // a sink has no value
        for (int r = 0; r < rows; ++r) {
            const int head = item.head * heads_per_kv + r % heads_per_kv;
            if (call.sinks != nullptr) merge_row(r, call.sinks[head], 1.0f, s.acc);
            const vf inverse = V::set1(1.0f / s.total_l[r]);
            float* row = s.total + r * dv;
            for (int c = 0; c < dv; c += V::W) V::store(row + c, V::mul(V::load(row + c), inverse));
            uint8_t* to = call.out.at(tile.first_token + r / heads_per_kv, head, call.fresh.form);
            store_row<V>(row, heads.v_size, call.fresh.form, to);
        }
    }

    float* partial_of(int group) const {
        return item.partials + partial_floats(rows, heads.v_size) * (group - item.first_group);
    }
};

template <class V>
void attend(const AttentionCall& call, const Item& item, uint8_t* scratch) {
    TileRun<V> run(call, item, scratch);
    run.load_queries();
    if (item.partials == nullptr) run.clear_total();
    for (int group = item.first_group; group <= item.last_group; ++group) {
        if (item.partials != nullptr) {  // the partial is worked out where it will be merged from
            run.s.acc = run.partial_of(group);
            run.s.m = run.s.acc + int64_t{run.rows} * run.dv;
            run.s.l = run.s.m + run.rows;
        }
        run.attend_group(group);
        if (item.partials != nullptr) continue;
        for (int r = 0; r < run.rows; ++r) run.merge_row(r, run.s.m[r], run.s.l[r], run.s.acc + r * run.dv);
    }
    if (item.partials == nullptr) run.write_output();
}

template <class V>
void merge(const AttentionCall& call, const Item& item, uint8_t* scratch) {
    TileRun<V> run(call, item, scratch);
    run.clear_total();
    for (int group = item.first_group; group <= item.last_group; ++group) {
        const float* acc = run.partial_of(group);
        const float* m = acc + int64_t{run.rows} * run.dv;
        const float* l = m + run.rows;
        for (int r = 0; r < run.rows; ++r) run.merge_row(r, m[r], l[r], acc + r * run.dv);
    }
    run.write_output();
}

}  // namespace
}  // namespace kt
