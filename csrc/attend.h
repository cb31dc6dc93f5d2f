// Attention of one tile of queries over the pages its sequence sees. One algorithm, over a policy V of operations.
//
// A tile is at most kTileTokens new tokens of one sequence that share their own block-table entry, times the query
// heads of one KV head; these are the rows. Blocks are the outer loop and groups of up to kMaxRows rows the inner one,
// so a block's bytes stay in the nearest cache while all rows use them.
//
// What a row computes never depends on the other rows: sums run in the order of tokens and channels, a token that a row
// may not see adds an exact zero (if its value is finite), and a group's partial (m, l, acc) starts afresh every kEntriesPerPartial entries.
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
    int lo, hi;             // rows [lo, hi) are seen by some query of the tile
    int first, stop;        // rows [first, stop) belong to the entry, and hold what was written
    int logical;            // logical index of row 0
    int entry, shift;
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
    float v_unit = 0.0f;  // of the span's value codes, see scale_codes

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
        span.entry = entry_index;
        span.shift = entry.shift;
        span.logical = entry_logical - entry.first_row + part * kSpanTokens;
        const int last = tile.logical + tile.num_tokens;  // one past the newest query
        int lo = entry.first_row, hi = entry.first_row + entry.rows;
        span.first = larger(lo - part * kSpanTokens, 0);
        span.stop = smaller(hi - part * kSpanTokens, kSpanTokens);
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

    // Scales of the entry's rows as float; zero elsewhere, where memory may hold anything.
    void load_scales(const Section& section, const Span& span, float* to) const {
        for (int t = 0; t < kSpanTokens; t += V::W) {
            if (t + V::W <= heads.block_tokens && section.form == Form::int8) {
                V::store(to + t, V::load(reinterpret_cast<const fp16*>(section.scales + t)));
            } else {
                V::store(to + t, V::set1(1.0f));
            }
        }
        for (int t = 0; t < span.first; ++t) to[t] = 0.0f;
        for (int t = span.stop; t < kSpanTokens; ++t) to[t] = 0.0f;
    }

    // Value scales become what a weight of at most 1 is multiplied with to give its int16 code. All of the entry's rows
    // have a say in the unit of the codes, whoever sees them, so that it does not depend on the tile.
    void scale_codes() {
        const float most = largest_magnitude<V>(s.v_scales, kSpanTokens);
        const bool codable = most > kTiny && most < __builtin_inff();
        const vf inverse = V::set1(codable ? kCodeLimit / most : 0.0f);
        for (int t = 0; t < kSpanTokens; t += V::W) V::store(s.v_scales + t, V::mul(V::load(s.v_scales + t), inverse));
        v_unit = codable ? most / kCodeLimit : most * 0.0f;  // NaN where a scale is not finite: codes would lose it
    }

    KT_INLINE static void fetch_scales(const Section& section) {
        if (section.form != Form::int8) return;
        for (int t = 0; t < kSpanTokens; t += 32) V::prefetch(section.scales + t);
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
        if (span.v.form == Form::int8) {
            load_scales(span.v, span, s.v_scales);
            scale_codes();
        }
        if (call.prefetch) {
            fetch_scales(next.k);
            fetch_scales(next.v);
        }
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
        float top[NR], base[NR], keep[NR], share[NR], sum[NR];
        if (span.k.form == Form::int8) {
            int8_scores<NR>(span, next, first, begin, end, scores);
        } else {
            float_scores<NR>(first, begin, end, scores);
        }
        scale_scores<NR>(span.k.form == Form::int8 ? s.query_scales + first : nullptr, begin, end, lo, hi, scores, top);
        float* acc = s.acc + first * dv;
        if (span.v.form == Form::int8) {
            for (int r = 0; r < NR; ++r) base[r] = finite_base(top[r]);
            raise_tops<NR>(first, top, keep, share);
            int8_weights<NR>(begin, end, base, scores, codes, sum);
            for (int r = 0; r < NR; ++r) s.l[first + r] = s.l[first + r] * keep[r] + sum[r] * share[r];
            for (int r = 0; r < NR; ++r) share[r] *= v_unit;
            int8_values<NR>(span, next, first, codes[0], begin, end, keep, share, acc);
        } else {
            raise_tops<NR>(first, top, keep, share);
            for (int r = 0; r < NR; ++r) base[r] = finite_base(s.m[first + r]);
            float_weights<NR>(begin, end, base, scores, sum);
            for (int r = 0; r < NR; ++r) s.l[first + r] = s.l[first + r] * keep[r] + sum[r];
            float_values_sum<NR>(values + least * value_stride, value_stride, scores[0] + least, most - least, keep,
                                 acc);
        }
    }

    template <int NR>
    void int8_scores(const Span& span, const Span& next, int first, int begin, int end,
                     float (*scores)[kSpanTokens]) const {
        const auto* keys = reinterpret_cast<const int8_t*>(span.k.rows);
        const int16_t* codes = s.codes + first * dk;
        const bool fetch = call.prefetch && first == 0 && next.k.form == Form::int8;
        constexpr int64_t stride = kKeyTileTokens * kTileDepth;
        const int groups = heads.k_size / kTileDepth;
        for (int t = begin; t < end; t += V::W) {
            const int8_t* at = keys + int64_t{t & ~15} * heads.k_size + (t & 15) * kTileDepth;
            const auto done = [&](int r, vf sum) { V::store(scores[r] + t, sum); };
            if (fetch) {
                int8_tile<V, NR, true>(codes, dk, at, stride, groups, next.k.rows + int64_t{t} * heads.k_size, done);
            } else {
                int8_tile<V, NR, false>(codes, dk, at, stride, groups, nullptr, done);
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

    // The rows of a tile go side by side through the next three functions, so that one's latency hides another's.

    // Products become scores in place, in units of log 2; top[r] is the row's highest. `query_scales` null: those of
    // queries that were not quantised.
    template <int NR>
    void scale_scores(const float* query_scales, int begin, int end, const int* lo, const int* hi,
                      float (*scores)[kSpanTokens], float* top) const {
        const float unit = call.softcap > 0 ? 1.0f : kLog2E;
        vf highest[NR], scale[NR];
        bool whole = true;
        for (int r = 0; r < NR; ++r) {
            highest[r] = V::set1(kMinusInfinity);
            scale[r] = V::set1((query_scales == nullptr ? call.scale : query_scales[r]) * unit);
            whole = whole && lo[r] <= begin && hi[r] >= end;
        }
        for (int t = begin; t < end; t += V::W) {
            const vf k_scale = V::load(s.k_scales + t);
            const vf at = V::add(V::iota(), V::set1(static_cast<float>(t)));
            for (int r = 0; r < NR; ++r) {
                vf score = V::mul(V::load(scores[r] + t), V::mul(scale[r], k_scale));
                if (call.softcap > 0) {
                    score = V::mul(V::set1(call.softcap * kLog2E), tanh<V>(V::div(score, V::set1(call.softcap))));
                }
                if (!whole) {
                    const vf hidden = V::set1(kMinusInfinity);
                    score = V::select(V::less(at, V::set1(static_cast<float>(lo[r]))), hidden, score);
                    score = V::select(V::less(at, V::set1(static_cast<float>(hi[r]))), score, hidden);
                }
                V::store(scores[r] + t, score);
                highest[r] = V::max(score, highest[r]);
            }
        }
        for (int r = 0; r < NR; ++r) top[r] = V::reduce_max(highest[r]);
    }

    // What scores are taken relative to; 0 where nothing was seen.
    static float finite_base(float m) { return m == kMinusInfinity ? 0.0f : m; }

    // m[r] becomes the larger of itself and top[r]; `keep` is what the row's earlier sums must be multiplied with,
    // `share` what sums relative to top[r].
    template <int NR>
    void raise_tops(int first, const float* top, float* keep, float* share) const {
        alignas(64) float before[kRowPadding] = {}, highest[kRowPadding] = {};
        for (int r = 0; r < NR; ++r) {
            const float now = larger(s.m[first + r], top[r]), base = finite_base(now);
            before[r] = s.m[first + r] - base;
            highest[r] = top[r] - base;
            s.m[first + r] = now;
        }
        for (int r = 0; r < NR; r += V::W) {
            V::store(before + r, exp2_falling<V>(V::load(before + r)));
            V::store(highest + r, exp2_falling<V>(V::load(highest + r)));
        }
        for (int r = 0; r < NR; ++r) {
            keep[r] = before[r];
            share[r] = highest[r];
        }
    }

    // Scores become weights 2^(score - base) in place.
    template <int NR>
    void float_weights(int begin, int end, const float* base, float (*scores)[kSpanTokens], float* total) const {
        vf sum[NR];
        for (int r = 0; r < NR; ++r) sum[r] = V::set1(0.0f);
        for (int t = begin; t < end; t += V::W) {
            for (int r = 0; r < NR; ++r) {
                const vf weight = exp2_falling<V>(V::sub(V::load(scores[r] + t), V::set1(base[r])));
                V::store(scores[r] + t, weight);
                sum[r] = V::add(sum[r], weight);
            }
        }
        for (int r = 0; r < NR; ++r) total[r] = V::reduce_add(sum[r]);
    }

    // Scores become codes of weights times value scales. The span's own highest score has weight 1, so that the codes
    // use their 15 bits wherever that score stands among the row's others.
    template <int NR>
    void int8_weights(int begin, int end, const float* base, const float (*scores)[kSpanTokens],
                      int16_t (*codes)[kSpanTokens], float* total) const {
        vf sum[NR];
        for (int r = 0; r < NR; ++r) sum[r] = V::set1(0.0f);
        for (int t = begin; t < end; t += V::W) {
            const vf v_scale = V::load(s.v_scales + t);
            for (int r = 0; r < NR; ++r) {
                const vf weight = exp2_falling<V>(V::sub(V::load(scores[r] + t), V::set1(base[r])));
                sum[r] = V::add(sum[r], weight);
                V::store_int16(codes[r] + t, V::to_int(V::mul(weight, v_scale)));
            }
        }
        for (int r = 0; r < NR; ++r) total[r] = V::reduce_add(sum[r]);
    }

    template <int NR>
    void int8_values(const Span& span, const Span& next, int first, const int16_t* codes, int begin, int end,
                     const float* factor, const float* scale, float* acc) const {
        const int64_t stride = int64_t{heads.v_size} * kTileDepth;
        const auto* values = reinterpret_cast<const int8_t*>(span.v.rows) + begin / kTileDepth * stride;
        const bool fetch = call.prefetch && first == 0 && next.v.form == Form::int8;
        const int groups = (end - begin) / kTileDepth;
        for (int c = 0; c < heads.v_size; c += V::W) {
            const auto done = [&](int r, vf sum) {
                float* to = acc + r * dv + c;
                V::store(to, V::fma(sum, V::set1(scale[r]), V::mul(V::load(to), V::set1(factor[r]))));
            };
            const int8_t* at = values + c * kTileDepth;
            if (fetch) {
                const uint8_t* ahead = next.v.rows + int64_t{c} * (end - begin);
                int8_tile<V, NR, true>(codes + begin, kSpanTokens, at, stride, groups, ahead, done);
            } else {
                int8_tile<V, NR, false>(codes + begin, kSpanTokens, at, stride, groups, nullptr, done);
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

    // Works through the item's groups; the next span is known while one is worked on, so that its bytes are called for.
    void attend_groups() {
        const int32_t start = batch.entry_starts[tile.sequence];
        Cursor cursor{larger(start + item.first_group * kEntriesPerPartial, tile.first_entry),
                      smaller(start + item.last_group * kEntriesPerPartial + kEntriesPerPartial - 1, tile.own_entry), -1};
        int group = item.first_group;
        begin_group(group);
        Span span = next_span(cursor);
        while (span.lo < span.hi) {
            const Span next = next_span(cursor);
            for (; group < (span.entry - start) / kEntriesPerPartial; begin_group(++group)) end_group();
            attend_span(span, next);
            span = next;
        }
        for (; group < item.last_group; begin_group(++group)) end_group();
        end_group();
    }

    struct Cursor {
        int32_t entry, last_entry;
        int part;  // -1: the entry was not begun
    };

    // The next span with visible rows; an empty one at the end.
    Span next_span(Cursor& cursor) const {
        for (; cursor.entry <= cursor.last_entry; ++cursor.entry, cursor.part = -1) {
            const Entry& entry = batch.entries[cursor.entry];
            if (entry.block < 0) continue;
            const int parts = (entry.first_row + entry.rows + kSpanTokens - 1) / kSpanTokens;
            cursor.part = cursor.part < 0 ? entry.first_row / kSpanTokens : cursor.part + 1;
            for (; cursor.part < parts; ++cursor.part) {
                const Span span = span_of(cursor.entry, cursor.part);
                if (span.lo < span.hi) return span;
            }
        }
        return Span{};
    }

    void begin_group(int group) {
        if (item.partials != nullptr) {  // the partial is worked out where it will be merged from
            s.acc = partial_of(group);
            s.m = s.acc + int64_t{rows} * dv;
            s.l = s.m + rows;
        }
        for (int r = 0; r < rows; ++r) {
            s.m[r] = kMinusInfinity;
            s.l[r] = 0.0f;
        }
        for (int64_t i = 0; i < int64_t{rows} * dv; ++i) s.acc[i] = 0.0f;
    }

    void end_group() {
        if (item.partials != nullptr) return;
        for (int r = 0; r < rows; ++r) merge_row(r, s.m[r], s.l[r], s.acc + r * dv);
    }

    // total += partial, in the fixed order of groups.
    void merge_row(int row, float m, float l, const float* acc) {
        if (m == kMinusInfinity && !(l != l)) return;
        const float before = s.total_m[row], now = larger(before, m);
        const float keep = before == kMinusInfinity ? 0.0f : exp2_falling_one<V>(before - now);
        const float share = exp2_falling_one<V>(m == kMinusInfinity ? 0.0f : m - now);
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
            if (call.sinks != nullptr) merge_row(r, call.sinks[head] * kLog2E, 1.0f, s.acc);
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
    run.clear_total();
    run.attend_groups();
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
