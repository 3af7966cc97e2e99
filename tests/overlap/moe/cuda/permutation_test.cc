// Row positions of an MoE layer on one GPU match the CPU.
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "overlap/moe/load.h"
#include "schedule/moe.h"
#include "tests/overlap/moe/cuda/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

TEST_F(GpuMoe, RoutingMatchesTheCpu) {
  for (const int experts : {1, 2, 8, 60, 64, 65, 128, 256, 257, 512, 1024}) {
    for (const int top_k : {1, 2, 4, 8, 40}) {
      if (top_k > experts) continue;
      for (const int form : {0, 1, 2, 3}) {
        const int64_t rows = 37;
        const RouterOptions options{top_k, form % 2 == 1, form < 2, form == 3 ? 2.5f : 1.0f};
        std::vector<float> logits = random_values(rows * experts, uint64_t(experts), 4);
        logits[size_t(3 * experts)] = std::numeric_limits<float>::quiet_NaN();
        if (experts > 1) logits[size_t(5 * experts) + 1] = logits[size_t(5 * experts)];  // a tie
        std::vector<float> bias = random_values(form == 1 ? experts : 0, 9, 0.1f);
        std::vector<float> scores(logits.size()), weights(size_t(rows * top_k));
        std::vector<int32_t> chosen(weights.size());
        tandem::route_forward(Exec{}, Tensor(logits.data(), DType::f32, {rows, experts}),
                              bias.empty() ? Tensor() : Tensor(bias.data(), DType::f32, {experts}),
                              options, Tensor(scores.data(), DType::f32, {rows, experts}),
                              Tensor(chosen.data(), DType::i32, {rows, top_k}),
                              Tensor(weights.data(), DType::f32, {rows, top_k}));
        const DeviceMemory on_logits = to_device(logits), on_bias = to_device(bias),
                           on_scores(scores.size() * 4), on_experts(weights.size() * 4),
                           on_weights(weights.size() * 4);
        gpu::route_forward(stream(), on_logits.view(DType::f32, {rows, experts}),
                           bias.empty() ? Tensor() : on_bias.view(DType::f32, {experts}), options,
                           on_scores.view(DType::f32, {rows, experts}),
                           on_experts.view(DType::i32, {rows, top_k}),
                           on_weights.view(DType::f32, {rows, top_k}), {});
        const auto found_scores = to_host<float>(on_scores, scores.size());
        for (size_t i = 0; i < scores.size(); ++i) {
          ASSERT_NEAR(found_scores[i], scores[i], 2e-6)
              << experts << " form " << form << " at " << i;
        }
        const auto found = to_host<int32_t>(on_experts, chosen.size());
        const auto found_weights = to_host<float>(on_weights, weights.size());
        for (size_t i = 0; i < chosen.size(); ++i) {
          const std::string what = fmt::format("{} of {} form {} row {} choice {}", top_k, experts,
                                               form, i / size_t(top_k), i % size_t(top_k));
          const size_t row = i / size_t(top_k) * size_t(experts);
          const auto key = [&](int32_t e) {
            return scores[row + size_t(e)] + (bias.empty() ? 0 : bias[size_t(e)]);
          };
          ASSERT_TRUE(found[i] >= 0 && found[i] < experts) << what << ": " << found[i];
          // If two keys are equal up to rounding, either may be first.
          if (found[i] != chosen[i]) {
            ASSERT_NEAR(key(found[i]), key(chosen[i]), 1e-6) << what;
          } else if (std::isnan(weights[i])) {
            ASSERT_TRUE(std::isnan(found_weights[i])) << what;
          } else {
            ASSERT_NEAR(found_weights[i], weights[i], 1e-5 * double(options.scale)) << what;
          }
        }
      }
    }
  }
}

struct Routings {
  std::string name;
  int experts, top_k;
  std::vector<int32_t> chosen;
};

std::vector<Routings> all_routings() {
  std::vector<Routings> all;
  for (const int experts : {1, 3, 8, 64, 200}) {
    for (const int top_k : {1, 2, 8}) {
      if (top_k > experts) continue;
      for (const int64_t rows : {0, 1, 5, 127, 700, 3001}) {
        for (const double imbalance : {1.0, 0.0}) {
          all.push_back(
              {fmt::format("{} of {}, {} rows, imbalance {}", top_k, experts, rows, imbalance),
               experts, top_k, chosen_experts({experts, 1, 1}, top_k, {imbalance, 3}, 0, rows)});
        }
      }
    }
  }
  // All rows to the last expert, and, for top-2, to the first two.
  all.push_back({"one expert", 16, 1, std::vector<int32_t>(513, 15)});
  all.push_back({"two experts", 16, 2, {}});
  for (int row = 0; row < 300; ++row) all.back().chosen.insert(all.back().chosen.end(), {1, 0});
  return all;
}

TEST_F(GpuMoe, EveryRoutingHasAPositionAndEveryTileABlock) {
  for (const Routings& c : all_routings()) {
    for (const bool some : {false, true}) {  // all experts, or only the second half
      const int first = some ? c.experts / 2 : 0, groups = c.experts - first;
      const GroupedShape shape{.groups = groups, .rows = int64_t(c.chosen.size())};
      const size_t padded = size_t(shape.padded_rows());
      constexpr int kBlocks = 7, kColumns[] = {3, 1, 3}, kSteps[] = {5, 9, 4},
                    kRowTiles[] = {1, 1, 2};
      constexpr int kTables = 3;
      const DeviceMemory experts = to_device(c.chosen), counts(size_t(groups) * 4),
                         source(std::max<size_t>(padded, 1) * 4),
                         position(std::max<size_t>(c.chosen.size(), 1) * 4), dropped(4);
      DeviceMemory work_items[kTables];
      MoePermutation p;
      p.experts = reinterpret_cast<int32_t*>(experts.data());
      p.routings = int64_t(c.chosen.size());
      p.top_k = c.top_k;
      p.first = first;
      p.groups = groups;
      p.all_experts = c.experts;
      p.counts = reinterpret_cast<int32_t*>(counts.data());
      p.source = reinterpret_cast<int32_t*>(source.data());
      p.position = reinterpret_cast<int32_t*>(position.data());
      p.dropped = reinterpret_cast<int32_t*>(dropped.data());
      p.table_count = kTables;
      for (int i = 0; i < kTables; ++i) {
        // In the second table, two of the blocks join late.
        const schedule::BlockSlots slots{kBlocks, i == 1 ? kBlocks - 2 : kBlocks, i == 1 ? 2 : 0};
        const int of_block = shape.row_tiles() * kColumns[i] / kBlocks + 2 + slots.rounds;
        work_items[i] = DeviceMemory(sizeof(schedule::GroupedWork) * size_t(kBlocks * of_block));
        p.tables[i] = {reinterpret_cast<schedule::GroupedWork*>(work_items[i].data()), slots,
                       of_block, kColumns[i], kSteps[i]};
        p.tables[i].row_tiles = kRowTiles[i];
      }
      for (int repeat = 0; repeat < 2; ++repeat) launch_permute(p, stream());

      std::vector<int32_t> expected_counts(size_t(groups), 0);
      for (const int32_t e : c.chosen) {
        if (e >= first) ++expected_counts[size_t(e - first)];
      }
      ASSERT_EQ(to_host<int32_t>(counts, size_t(groups)), expected_counts) << c.name;
      std::vector<int> begin(size_t(groups) + 1, 0);
      for (size_t g = 0; g < size_t(groups); ++g) {
        begin[g + 1] = begin[g] + schedule::group_tiles(expected_counts[g], kGroupedRows);
      }
      std::vector<int32_t> next(begin.size()), expected_position(c.chosen.size(), -1);
      const size_t rows = size_t(begin.back()) * kGroupedRows;
      ASSERT_LE(rows, padded) << c.name;
      std::vector<int32_t> expected_source(rows, -1);
      for (size_t g = 0; g < next.size(); ++g) next[g] = begin[g] * kGroupedRows;
      for (size_t i = 0; i < c.chosen.size(); ++i) {
        if (c.chosen[i] < first) continue;
        const int32_t at = next[size_t(c.chosen[i] - first)]++;
        expected_position[i] = at;
        expected_source[size_t(at)] = int32_t(i) / c.top_k;
      }
      ASSERT_EQ(to_host<int32_t>(position, expected_position.size()), expected_position) << c.name;
      ASSERT_EQ(to_host<int32_t>(source, rows), expected_source) << c.name;
      ASSERT_EQ(to_host<int32_t>(dropped, 1)[0], 0) << c.name;
      for (int i = 0; i < kTables; ++i) {
        const auto table = to_host<schedule::GroupedWork>(
            work_items[i], size_t(kBlocks * p.tables[i].items_of_block));
        std::vector<int> seen(size_t(begin.back() * kColumns[i]), 0);
        for (int block = 0; block < kBlocks; ++block) {
          for (const auto* work = &table[size_t(block * p.tables[i].items_of_block)];
               work->end != 0; ++work) {
            ASSERT_EQ(work->end, kSteps[i]) << c.name;
            ASSERT_GE(work->row, begin[size_t(work->group)]) << c.name;
            ASSERT_LE(work->row + work->rows, begin[size_t(work->group) + 1]) << c.name;
            ASSERT_LE(work->rows, kRowTiles[i]) << c.name;
            // Only a group's last tile may be partial.
            ASSERT_TRUE(work->rows == kRowTiles[i] ||
                        work->row + work->rows == begin[size_t(work->group) + 1])
                << c.name;
            for (int row = work->row; row < work->row + work->rows; ++row) {
              ++seen.at(size_t(row * kColumns[i] + work->column));
            }
          }
        }
        ASSERT_EQ(std::ranges::count(seen, 1), int64_t(seen.size())) << c.name;
      }
    }
  }
}

/// Rows of each group, by source; `rank` computes the positions of all of them.
struct Spread {
  std::string name;
  int rank;
  std::vector<std::vector<int>> rows;
  int sources() const { return int(rows.size()); }
  int groups() const { return int(rows[0].size()); }
  /// Indexed in the order of arriving sources.
  int at(int step, int group) const {
    return rows[size_t(schedule::moe_source(rank, sources(), step))][size_t(group)];
  }
  int of_group(int group) const {
    int all = 0;
    for (const auto& source : rows) all += source[size_t(group)];
    return all;
  }
  int64_t routings() const {
    int maximum = 1;
    for (const auto& source : rows) {
      maximum = std::max(maximum, std::accumulate(source.begin(), source.end(), 0));
    }
    return maximum + 3;
  }
};

std::vector<Spread> all_spreads() {
  std::vector<Spread> all;
  for (int world = 1; world <= kMaxGpus; ++world) {
    const int rank = world / 2;
    uint64_t draws = 0;
    const auto add = [&](const char* name, const auto& rows_of) {
      Spread spread{fmt::format("{} of {} sources, {}", rank, world, name), rank, {}};
      for (int source = 0; source < world; ++source) {
        auto& rows = spread.rows.emplace_back();
        for (int group = 0; group < 5; ++group) rows.push_back(rows_of(source == rank, group));
      }
      all.push_back(std::move(spread));
    };
    const auto any = [&](uint32_t maximum) {
      return int(philox(31, uint64_t(world), draws++)[0] % maximum);
    };
    add("some rows each", [&](bool, int) { return any(400); });
    add("many rows of a group", [&](bool, int group) { return any(group == 2 ? 4000 : 3); });
    add("own rows", [&](bool local, int) { return local ? any(700) : 0; });
    add("others' rows", [&](bool local, int) { return local ? 0 : any(300); });
    add("no rows", [&](bool, int) { return 0; });
    add("whole tiles", [&](bool, int group) { return 128 * (group % 3); });
    add("own rows up to a tile's end and one behind",
        [&](bool local, int group) { return local ? 127 + group : group % 2; });
  }
  return all;
}

/// Row tiles of one work item of a table.
struct RowWork {
  int row, rows, group, stage;
};

/// One segment of a table: work items whose rows are processed together.
using Segment = std::vector<RowWork>;

/// Computed per row from its source. A work item waits for the last of its rows.
std::vector<Segment> expected_segments(const Spread& spread, const GroupedTable& table) {
  const int last = spread.sources() - 1, tile_rows = table.row_tiles * kGroupedRows;
  const bool by_stage = table.staged || table.tiles != GroupedTiles::all;
  std::vector<Segment> segments;
  for (int stage = 0; stage <= (by_stage ? last : 0); ++stage) {
    int first_tile = 0;
    for (int group = 0; group < spread.groups(); ++group) {
      std::vector<int> source_of_row;
      for (int step = 0; step <= last; ++step) {
        source_of_row.insert(source_of_row.end(), size_t(spread.at(step, group)), step);
      }
      const int rows = int(source_of_row.size()), tiles = (rows + kGroupedRows - 1) / kGroupedRows;
      Segment segment;
      for (int row = 0; row < rows; row += tile_rows) {
        const int of = source_of_row[size_t(std::min(row + tile_rows, rows)) - 1];
        if (by_stage && of != stage) continue;
        if (table.tiles == GroupedTiles::local && of > 0) continue;
        if (table.tiles == GroupedTiles::remote && of == 0) continue;
        const int tile = row / kGroupedRows;
        segment.push_back({first_tile + tile, std::min(table.row_tiles, tiles - tile), group,
                           by_stage ? of : last});
      }
      segments.push_back(std::move(segment));
      first_tile += tiles;
    }
  }
  return segments;
}

/// Work items of each block of a table, dealt out one at a time.
std::vector<std::vector<schedule::GroupedWork>> expected_items(const std::vector<Segment>& segments,
                                                               const GroupedTable& table, int rows,
                                                               int leaving) {
  std::vector<std::vector<schedule::GroupedWork>> blocks(size_t(table.slots.blocks));
  size_t tiles = 0;
  for (const Segment& segment : segments) tiles += segment.size() * size_t(table.column_tiles);
  // Blocks that join late start after the work that the others do before, by this call's rows.
  const int before =
      table.slots.early * table.joining.rounds(rows, leaving, int(tiles), table.slots.early);
  int dealt = 0;
  for (const Segment& segment : segments) {
    const size_t band = size_t(kGroupedBand / table.row_tiles);
    for (size_t first = 0; first < segment.size(); first += band) {
      for (int column = 0; column < table.column_tiles; ++column) {
        for (size_t i = first; i < std::min(first + band, segment.size()); ++i) {
          const RowWork& work = segment[i];
          const int block =
              dealt < before ? dealt % table.slots.early : (dealt - before) % table.slots.blocks;
          ++dealt;
          blocks[size_t(block)].push_back({work.row, int16_t(work.rows),
                                           int16_t(table.first_column + column),
                                           int16_t(work.group), int16_t(work.stage), table.steps});
        }
      }
    }
  }
  return blocks;
}

// Tables of the layer's GEMMs, sized exactly to the maximum of their shapes.
TEST_F(GpuMoe, TablesAndOrdersOfRemoteRowsMatchTheHost) {
  const auto all_of = [](const auto& value) {  // members, for comparing and printing
    if constexpr (requires { value.end; }) {
      return std::vector<int>{value.row,   value.rows,  value.column,
                              value.group, value.stage, value.end};
    } else {
      return std::vector<int>{value.row, value.rows, value.stage};
    }
  };
  for (const Spread& spread : all_spreads()) {
    const int sources = spread.sources(), groups = spread.groups(), first = 1;
    const int64_t routings = spread.routings();
    std::vector<int32_t> chosen;
    for (const auto& rows : spread.rows) {
      const size_t begin = chosen.size();
      for (int group = 0; group < groups; ++group) {
        chosen.insert(chosen.end(), size_t(rows[size_t(group)]), first + group);
      }
      // Experts before and after this range.
      while (chosen.size() < begin + size_t(routings)) {
        chosen.push_back(chosen.size() % 2 ? 0 : first + groups);
      }
      for (size_t i = chosen.size() - 1; i > begin; --i) {
        std::swap(chosen[i], chosen[begin + philox(32, begin, i)[0] % (i - begin + 1)]);
      }
    }
    for (const bool paired : {false, true}) {
      const GroupedShape shape{
          .groups = groups, .rows = sources * routings, .columns = 520, .k = 64, .paired = paired};
      const auto gemm = make_grouped_gemm(shape);
      // As in a layer's GEMMs; no layer uses the last two.
      const GroupedCut cuts[] = {
          {.reserved_blocks = 12,
           .joining = {.of_row = 0.015625f},
           .staged = true,
           .ordered = true},
          {.tiles = GroupedTiles::remote},
          {.reserved_blocks = 22, .tiles = GroupedTiles::local},
          {.reserved_blocks = 7, .joining = {.of_leaving = 1 << 12}, .ordered = true},
          {.reserved_blocks = 5,
           .joining = {.of_row = 0.0009765625f, .min_of_leaving = 0.5f},
           .first_column = 1,
           .column_tiles = 1,
           .tiles = GroupedTiles::remote,
           .ordered = true},
          {.tiles = GroupedTiles::local, .ordered = true}};
      static_assert(std::size(cuts) == kMaxTables);
      const DeviceMemory experts = to_device(chosen), counts(size_t(sources * groups) * 4),
                         source(size_t(shape.padded_rows()) * 4), position(chosen.size() * 4),
                         dropped(4),
                         ready = to_device(std::vector<uint32_t>(size_t(shape.row_tiles()), 77));
      MoePermutation p;
      p.experts = reinterpret_cast<int32_t*>(experts.data());
      p.routings = routings;
      p.sources = sources;
      p.rank = spread.rank;
      p.local_row = kLocalRows;
      p.first = first;
      p.groups = groups;
      p.all_experts = groups + 2;
      p.counts = reinterpret_cast<int32_t*>(counts.data());
      p.source = reinterpret_cast<int32_t*>(source.data());
      p.position = reinterpret_cast<int32_t*>(position.data());
      p.dropped = reinterpret_cast<int32_t*>(dropped.data());
      p.ready = reinterpret_cast<uint32_t*>(ready.data());
      constexpr unsigned kLeaving = 5;
      const DeviceMemory leaving = to_device(std::vector<unsigned>{kLeaving});
      p.leaving = reinterpret_cast<const unsigned*>(leaving.data());
      for (const GroupedCut& cut : cuts)
        p.tables[p.table_count++] = gemm->table(gemm->add_table(cut));
      launch_permute(p, stream());
      // State that a previous call leaves.
      for (const GroupedTable& table : p.tables) {
        if (!table.order) continue;
        check(cudaMemsetAsync(&table.order[1], 0x11, sizeof table.order[1], stream()), "take rows");
      }
      launch_permute(p, stream());

      const auto read = [&]<typename T>(const T* from, size_t count) {
        std::vector<T> host(count);
        check(
            cudaMemcpyAsync(host.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream()),
            "read");
        check(cudaStreamSynchronize(stream()), "read");
        return host;
      };
      const std::string name = spread.name + (paired ? ", in pairs" : "");
      ASSERT_EQ(to_host<int32_t>(dropped, 1)[0], 0) << name;
      std::vector<uint32_t> expected_ready(size_t(shape.row_tiles()), 77);
      int row_tiles = 0, rows = 0;
      for (int group = 0; group < groups; ++group) {
        rows += int(spread.of_group(group));
        row_tiles += schedule::group_tiles(spread.of_group(group), kGroupedRows);
      }
      ASSERT_LE(row_tiles, shape.row_tiles()) << name;
      std::fill_n(expected_ready.begin(), row_tiles, 0);
      ASSERT_EQ(to_host<uint32_t>(ready, expected_ready.size()), expected_ready) << name;
      const int max_row_items =
          schedule::max_group_tiles(shape.rows, groups, (paired ? 2 : 1) * kGroupedRows);
      for (int i = 0; i < p.table_count; ++i) {
        const GroupedTable& table = p.tables[i];
        const std::string what = fmt::format("{}, table {}", name, i);
        const std::vector<Segment> segments = expected_segments(spread, table);
        const auto expected = expected_items(segments, table, rows, kLeaving);
        const size_t of_block = size_t(table.items_of_block);
        const auto found = read(table.work_items, size_t(table.slots.blocks) * of_block);
        for (size_t block = 0; block < expected.size(); ++block) {
          const auto& work_items = expected[block];
          ASSERT_LT(work_items.size(), of_block) << what << " block " << block;
          for (size_t j = 0; j < work_items.size(); ++j) {
            ASSERT_EQ(all_of(found[block * of_block + j]), all_of(work_items[j]))
                << what << " block " << block << " work " << j;
          }
          ASSERT_EQ(found[block * of_block + work_items.size()].end, 0)
              << what << " block " << block;
        }
        ASSERT_EQ(table.order != nullptr, cuts[i].ordered) << what;
        if (!table.order) continue;
        std::vector<RowWork> order;
        for (const Segment& segment : segments) {
          order.insert(order.end(), segment.begin(), segment.end());
        }
        ASSERT_LE(int(order.size()), max_row_items) << what;
        const auto found_order = read(table.order, 2 + order.size());
        ASSERT_EQ(found_order[0].row, int(order.size())) << what;
        ASSERT_EQ(found_order[1].row, 0) << what;
        for (size_t j = 0; j < order.size(); ++j) {
          ASSERT_EQ(all_of(found_order[2 + j]), all_of(order[j])) << what << " turn " << j;
        }
      }
    }
  }
}

TEST_F(GpuMoe, InvalidExpertIdsAreCounted) {
  const GroupedShape shape{.groups = 3, .rows = 4, .columns = 8, .k = 8};
  const auto gemm = make_grouped_gemm(shape);
  const DeviceMemory experts = to_device(std::vector<int32_t>{0, 3, -1, 2}), counts(3 * 4),
                     source(size_t(shape.padded_rows()) * 4), position(4 * 4), dropped(4);
  MoePermutation p;
  p.experts = reinterpret_cast<int32_t*>(experts.data());
  p.routings = 4;
  p.groups = p.all_experts = 3;
  p.counts = reinterpret_cast<int32_t*>(counts.data());
  p.source = reinterpret_cast<int32_t*>(source.data());
  p.position = reinterpret_cast<int32_t*>(position.data());
  p.dropped = reinterpret_cast<int32_t*>(dropped.data());
  p.tables[0] = gemm->table();
  p.table_count = 1;
  launch_permute(p, stream());
  EXPECT_EQ(to_host<int32_t>(dropped, 1)[0], 2);
}

}  // namespace
}  // namespace tandem::test
