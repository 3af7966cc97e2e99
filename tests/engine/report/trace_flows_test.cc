// Arrows between ranks in the traces of runs: as many as the schedule and the layout say.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/system/files.h"
#include "schedule/pipeline.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/observe/trace_form.h"

namespace tandem {
namespace {

constexpr int kStages = 2, kMicrobatches = 4;  // of a replica

std::string trace_of(Layout layout, const std::vector<std::string>& overrides) {
  const TempDir dir;
  std::vector<std::string> all{"train.steps=6",
                               "train.seq=16",
                               "model.layers=4",
                               "train.microbatch=1",
                               "trace.enabled=true",
                               "trace.steps=1",
                               "parallel.strategy=serial",
                               "trace.ranks=false",
                               fmt::format("train.batch={}", kMicrobatches * layout.dp)};
  all.insert(all.end(), overrides.begin(), overrides.end());
  TrainRequest request = request_for(layout, dir / "run", all);
  request.config.parallel.pp = kStages;
  run_on_threads(request);
  return read_file(dir / "run/trace.json");
}

using Call = std::pair<uint32_t, int64_t>;

/// Every call of a collective has an arrow to each rank but the last one.
void expect_arrows_of_calls(const TraceForm& form) {
  std::map<Call, std::vector<const FormSlice*>> calls;
  for (const FormSlice& slice : form.slices) {
    if (slice.role() == 3) calls[slice.call()].push_back(&slice);
  }
  std::map<Call, std::set<const FormSlice*>> reached;
  for (const FormArrow& arrow : form.arrows) {
    if (arrow.kind != "collective") continue;
    EXPECT_EQ(arrow.from->call(), arrow.to->call()) << arrow.name;
    EXPECT_GE(arrow.from->begin, arrow.to->begin) << arrow.name << ": from the last rank";
    EXPECT_TRUE(reached[arrow.from->call()].insert(arrow.to).second) << arrow.name;
  }
  for (const auto& [call, spans] : calls) {
    EXPECT_EQ(int(spans.size()), spans.front()->args["flow"][3].get<int>()) << spans.front()->name;
    EXPECT_EQ(reached[call].size(), spans.size() - 1) << spans.front()->name;
  }
}

/// A wait for a message whose send is in the trace has an arrow, another has none.
void expect_arrows_of_messages(const TraceForm& form) {
  using Key = std::tuple<Call, int, int>;
  std::set<Key> sends, receives, expected, found;
  for (const FormSlice& slice : form.slices) {
    const int peer = slice.args.value("peer", -1);
    if (slice.role() == 1) sends.insert({slice.call(), slice.rank, peer});
    if (slice.role() == 2) receives.insert({slice.call(), peer, slice.rank});
  }
  std::ranges::set_intersection(sends, receives, std::inserter(expected, expected.end()));
  for (const FormArrow& arrow : form.arrows) {
    if (arrow.kind != "message") continue;
    EXPECT_EQ(arrow.from->call(), arrow.to->call()) << arrow.name;
    EXPECT_TRUE(found.insert({arrow.from->call(), arrow.from->rank, arrow.to->rank}).second)
        << arrow.name;
  }
  EXPECT_EQ(found, expected);
}

size_t count_arrows(const TraceForm& form, const std::string& name) {
  return size_t(std::ranges::count(form.arrows, name, &FormArrow::name));
}

/// Messages between stages: one for each microbatch, boundary and pipeline.
void expect_arrows_of_stages(const TraceForm& form, Layout layout, int stages) {
  const auto pipelines = size_t(layout.tp * layout.dp);
  const auto per_kind = pipelines * size_t(kMicrobatches * (stages - 1));
  EXPECT_EQ(count_arrows(form, "pp_activations"), per_kind);
  EXPECT_EQ(count_arrows(form, "pp_gradients"), per_kind);
  EXPECT_EQ(count_arrows(form, "pp_lookups"), pipelines * kMicrobatches);
  std::map<std::tuple<std::string, int, int>, size_t> passes;  // by microbatch and sending stage
  for (const FormArrow& arrow : form.arrows) {
    if (!arrow.name.starts_with("pp_")) continue;
    const int from = arrow.from->args.at("stage"), to = arrow.to->args.at("stage");
    ++passes[{arrow.name, arrow.microbatch, from}];
    EXPECT_EQ(arrow.to->args.at("microbatch"), arrow.microbatch) << arrow.name;
    if (arrow.name == "pp_activations") {
      EXPECT_EQ(to, from + 1);
    }
    if (arrow.name == "pp_gradients") {
      EXPECT_EQ(to, from - 1);
    }
    if (arrow.name == "pp_lookups") {
      EXPECT_EQ(std::pair(from, to), std::pair(0, stages - 1));
    }
  }
  EXPECT_EQ(passes.size(), size_t(kMicrobatches * (2 * (stages - 1) + 1)));
  for (const auto& [pass, count] : passes) EXPECT_EQ(count, pipelines) << std::get<0>(pass);
}

/// Sums of a step over all axes, one after another, and the terms of a norm over stages.
void expect_arrows_of_sums(const TraceForm& form, Layout layout) {
  const int ranks = layout.tp * layout.dp * kStages;
  size_t along_axes = 0;
  for (const int size : {layout.tp, layout.dp, kStages}) {
    along_axes += size_t(ranks / size * (size - 1));
  }
  EXPECT_EQ(count_arrows(form, "step_times"), along_axes);
  EXPECT_EQ(count_arrows(form, "gradient_norm"), along_axes + size_t(ranks / kStages));
}

void expect_arrows_of_schedules(std::initializer_list<Layout> layouts) {
  for (const schedule::PipelineKind kind : schedule::pipeline_kinds()) {
    const int chunks = schedule::min_chunks(kind);
    for (const Layout layout : layouts) {
      SCOPED_TRACE(fmt::format("{} tp {} dp {}", schedule::name_of(kind), layout.tp, layout.dp));
      const auto form = check_form(nlohmann::json::parse(
          trace_of(layout, {fmt::format("parallel.schedule={}", schedule::name_of(kind)),
                            fmt::format("parallel.virtual_stages={}", chunks)})));
      EXPECT_EQ(form.unbound, 0);  // all ranks share a clock
      expect_arrows_of_stages(form, layout, kStages * chunks);
      expect_arrows_of_sums(form, layout);
      expect_arrows_of_calls(form);
      expect_arrows_of_messages(form);
    }
  }
}
TEST(TraceFlows, AreAsManyAsTheScheduleSays) {
  if (mpi_world) GTEST_SKIP() << "threads only";
  expect_arrows_of_schedules({{2, 2}});
}
TEST(TraceFlowsLong, AreAsManyAsTheScheduleSays) {
  expect_arrows_of_schedules({{1, 1}, {2, 1}, {1, 2}});
}

TEST(TraceFlows, OfOverlappedOperatorsJoinTheSendOfEveryTile) {
  if (mpi_world) GTEST_SKIP() << "threads only";
  const auto form = check_form(nlohmann::json::parse(
      trace_of({2, 2}, {"parallel.strategy=overlapped", "parallel.link=200MB/s,50us"})));
  expect_arrows_of_calls(form);
  expect_arrows_of_messages(form);
  EXPECT_GT(count_arrows(form, "ag_gemm"), 0u);
  for (const FormArrow& arrow : form.arrows) {
    // TP ranks are 0 and 1, 2 and 3, ...; DP ranks differ by 2, pipeline ranks by 4.
    const int distance = std::abs(arrow.from->rank - arrow.to->rank);
    if (arrow.name == "ag_gemm" || arrow.name == "gemm_rs") {
      EXPECT_EQ(distance, 1);
    }
    if (arrow.name.starts_with("pp_")) {
      EXPECT_EQ(distance, 4);
    }
  }
}

}  // namespace
}  // namespace tandem
