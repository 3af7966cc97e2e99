// Routing and places of a Mixture-of-Experts layer on one GPU are the CPU's.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string>

#include "overlap/cuda/local_moe.h"
#include "overlap/moe_load.h"
#include "tests/gpu/moe_values.h"

namespace tandem::test {
namespace {

using namespace gpu;

TEST_F(GpuMoe, RoutingIsTheCpus) {
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
        route_forward(Tensor(logits.data(), DType::f32, {rows, experts}), bias, options,
                      Tensor(scores.data(), DType::f32, {rows, experts}),
                      Tensor(chosen.data(), DType::i32, {rows, top_k}),
                      Tensor(weights.data(), DType::f32, {rows, top_k}));
        const DeviceMemory on_logits = to_device(logits), on_bias = to_device(bias),
                           on_experts(weights.size() * 4), on_weights(weights.size() * 4);
        launch_route(on_logits.view(DType::f32, {rows, experts}),
                     bias.empty() ? nullptr : reinterpret_cast<const float*>(on_bias.data()),
                     options, on_experts.view(DType::i32, {rows, top_k}),
                     on_weights.view(DType::f32, {rows, top_k}), stream());
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
          // Where two keys are equal but for rounding, either may come first.
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

struct Choices {
  std::string name;
  int experts, top_k;
  std::vector<int32_t> chosen;
};

std::vector<Choices> all_choices() {
  std::vector<Choices> all;
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
  // All rows to the last expert, and, of a pair, to the first two.
  all.push_back({"one expert", 16, 1, std::vector<int32_t>(513, 15)});
  all.push_back({"two experts", 16, 2, {}});
  for (int row = 0; row < 300; ++row) all.back().chosen.insert(all.back().chosen.end(), {1, 0});
  return all;
}

TEST_F(GpuMoe, EveryChoiceHasAPlaceAndEveryTileABlock) {
  for (const Choices& c : all_choices()) {
    for (const bool some : {false, true}) {  // all experts, or those of the second half
      const int first = some ? c.experts / 2 : 0, groups = c.experts - first;
      const GroupedShape shape{.groups = groups, .rows = int64_t(c.chosen.size())};
      const size_t padded = size_t(shape.padded_rows());
      constexpr int kBlocks = 7, kColumns[] = {3, 1, 3}, kSteps[] = {5, 9, 4},
                    kRowTiles[] = {1, 1, 2};
      constexpr int kTables = 3;
      const DeviceMemory experts = to_device(c.chosen), counts(size_t(groups) * 4),
                         source(std::max<size_t>(padded, 1) * 4),
                         place(std::max<size_t>(c.chosen.size(), 1) * 4), refused(4);
      DeviceMemory works[kTables];
      MoePlacing p;
      p.experts = reinterpret_cast<int32_t*>(experts.data());
      p.choices = int64_t(c.chosen.size());
      p.top_k = c.top_k;
      p.first = first;
      p.groups = groups;
      p.all_experts = c.experts;
      p.counts = reinterpret_cast<int32_t*>(counts.data());
      p.source = reinterpret_cast<int32_t*>(source.data());
      p.place = reinterpret_cast<int32_t*>(place.data());
      p.refused = reinterpret_cast<int32_t*>(refused.data());
      p.table_count = kTables;
      for (int i = 0; i < kTables; ++i) {
        // Of the second table, two of the blocks join late.
        const schedule::BlockTurns turns{kBlocks, i == 1 ? kBlocks - 2 : kBlocks, i == 1 ? 2 : 0};
        const int of_block = shape.row_tiles() * kColumns[i] / kBlocks + 2 + turns.rounds;
        works[i] = DeviceMemory(sizeof(schedule::GroupedWork) * size_t(kBlocks * of_block));
        p.tables[i] = {reinterpret_cast<schedule::GroupedWork*>(works[i].data()), turns, of_block,
                       kColumns[i], kSteps[i]};
        p.tables[i].row_tiles = kRowTiles[i];
      }
      for (int repeat = 0; repeat < 2; ++repeat) launch_place(p, stream());

      std::vector<int32_t> expected_counts(size_t(groups), 0);
      for (const int32_t e : c.chosen) {
        if (e >= first) ++expected_counts[size_t(e - first)];
      }
      ASSERT_EQ(to_host<int32_t>(counts, size_t(groups)), expected_counts) << c.name;
      std::vector<int> begin(size_t(groups) + 1, 0);
      for (size_t g = 0; g < size_t(groups); ++g) {
        begin[g + 1] = begin[g] + schedule::group_tiles(expected_counts[g], kGroupedRows);
      }
      std::vector<int32_t> next(begin.size()), expected_place(c.chosen.size(), -1);
      const size_t rows = size_t(begin.back()) * kGroupedRows;
      ASSERT_LE(rows, padded) << c.name;
      std::vector<int32_t> expected_source(rows, -1);
      for (size_t g = 0; g < next.size(); ++g) next[g] = begin[g] * kGroupedRows;
      for (size_t i = 0; i < c.chosen.size(); ++i) {
        if (c.chosen[i] < first) continue;
        const int32_t at = next[size_t(c.chosen[i] - first)]++;
        expected_place[i] = at;
        expected_source[size_t(at)] = int32_t(i) / c.top_k;
      }
      ASSERT_EQ(to_host<int32_t>(place, expected_place.size()), expected_place) << c.name;
      ASSERT_EQ(to_host<int32_t>(source, rows), expected_source) << c.name;
      ASSERT_EQ(to_host<int32_t>(refused, 1)[0], 0) << c.name;
      for (int i = 0; i < kTables; ++i) {
        const auto table =
            to_host<schedule::GroupedWork>(works[i], size_t(kBlocks * p.tables[i].works_of_block));
        std::vector<int> seen(size_t(begin.back() * kColumns[i]), 0);
        for (int block = 0; block < kBlocks; ++block) {
          for (const auto* work = &table[size_t(block * p.tables[i].works_of_block)];
               work->end != 0; ++work) {
            ASSERT_EQ(work->end, kSteps[i]) << c.name;
            ASSERT_GE(work->row, begin[size_t(work->group)]) << c.name;
            ASSERT_LE(work->row + work->rows, begin[size_t(work->group) + 1]) << c.name;
            ASSERT_LE(work->rows, kRowTiles[i]) << c.name;
            // Only a group's last tile has no other.
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

TEST_F(GpuMoe, ChoicesThatAreNoExpertAreCounted) {
  LocalMoe layer({.tokens = 4, .hidden = 64, .ffn = 64, .experts = 3, .dtype = DType::bf16});
  const std::vector<int32_t> chosen{0, 3, -1, 2};
  const std::vector<float> weights{1, 1, 1, 1};
  const DeviceMemory experts = to_device(chosen), on_weights = to_device(weights), x(4 * 64 * 2),
                     w_in(3 * 128 * 64 * 2), w_out(3 * 64 * 64 * 2), out(4 * 64 * 2);
  layer.forward(x.view(DType::bf16, {4, 64}),
                {experts.view(DType::i32, {4, 1}), on_weights.view(DType::f32, {4, 1})},
                w_in.view(DType::bf16, {3 * 128, 64}), w_out.view(DType::bf16, {3 * 64, 64}),
                out.view(DType::bf16, {4, 64}), stream());
  EXPECT_EQ(layer.refused(stream()), 2);
}

}  // namespace
}  // namespace tandem::test
