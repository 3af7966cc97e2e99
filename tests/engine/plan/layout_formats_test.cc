// Costs of wire formats follow measured kernels and collectives, memory follows the engine's, and
// the search over formats finds what a search over all combinations does.
#include "engine/plan/layout_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "engine/model/layout.h"
#include "engine/plan/cost/memory.h"
#include "engine/plan/layout_search.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

const std::string kResults = std::string(PUBLISHED_RUNS) + "/../results/h100x";

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(kResults + path);
  return nlohmann::json::parse(file);
}

TEST(LayoutFormats, CodecKernelsTakeTheMeasuredTime) {
  const GpuSpec gpu = *find_gpu("H100");
  int compared = 0;
  const nlohmann::json measurements = read_json("1/gpu-codecs.json");
  for (const auto& result : measurements["results"]) {
    const std::string codec = result["codec"];
    if (codec != "int8" && codec != "int6" && codec != "int4") continue;
    const double element = result["dtype"] == "f32" ? 4 : 2;
    // Without a link, one pass.
    const Exchange exchange{0, result["elements"], element, 1};
    const double predicted = 1e6 * encoded_seconds(exchange, Wire::parse(codec), gpu);
    for (const char* pass : {"encode", "decode"}) {
      const double measured = result["time_us"][pass];
      EXPECT_NEAR(predicted / measured, 1, .1) << codec << " " << pass << " of " << element;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 12);
}

/// Speed-up of an operation's largest message on two GPUs.
double measured_speed_up(const std::string& file) {
  const auto rows = read_json("2/" + file);
  const auto largest = std::ranges::max_element(
      rows, {}, [](const nlohmann::json& row) { return row["bytes"].get<double>(); });
  const auto& time = (*largest)["time_us"];
  return time["serial"].get<double>() / time["overlapped"].get<double>();
}

double predicted_speed_up(const std::string& codec) {
  const GpuSpec gpu = *find_gpu("H100");
  const double elements = 1e8;
  const Exchange exchange{2 * elements / gpu.nvlink_rate, elements, 2, 2};
  return exchange.seconds / encoded_seconds(exchange, Wire::parse(codec), gpu);
}

TEST(LayoutFormats, EncodedCollectivesHaveTheMeasuredSpeedUp) {
  for (const char* codec : {"int8", "int6", "int4"}) {
    for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"}) {
      const double measured =
          measured_speed_up(std::string("codecs/") + op + "-" + codec + ".json");
      EXPECT_NEAR(predicted_speed_up(codec) / measured, 1, .12) << op << " " << codec;
    }
  }
  EXPECT_NEAR(predicted_speed_up("lossless") / measured_speed_up("pairs/all_gather-lossless.json"),
              1, .12);
}

TEST(LayoutFormats, AccuracyIsAFormatOrAShare) {
  EXPECT_EQ(parse_accuracy("lossless"), 0);
  EXPECT_EQ(parse_accuracy("none"), 0);
  EXPECT_DOUBLE_EQ(parse_accuracy("int8"), Wire::parse("int8").error_bound());
  EXPECT_DOUBLE_EQ(parse_accuracy("2%"), .02);
  EXPECT_THROW(parse_accuracy("int9"), InvalidArgument);
  EXPECT_THROW(parse_accuracy("-1%"), InvalidArgument);
  EXPECT_THROW(parse_accuracy("nan%"), InvalidArgument);
}

TrainConfig make_small_config(bool has_experts) {
  TrainConfig config;
  config.model.hidden = 4096;
  config.model.layers = 32;
  config.model.heads = config.model.kv_heads = 32;
  config.model.head_dim = 128;
  config.model.ffn = 11264;
  config.model.vocab = 32768;
  config.model.max_seq = config.train.seq = 4096;
  config.train.batch = 32;
  config.model.tie_word_embeddings = false;
  if (has_experts) {
    config.model.experts = 8;
    config.model.top_k = 2;
    config.model.expert_ffn = 4096;
  }
  return config;
}

GpuSpec make_slow_gpu() {
  GpuSpec gpu = *find_gpu("H100");
  gpu.nic_rate /= 8;
  gpu.host_gpus = 4;
  return gpu;
}

constexpr double kAnyMemory = 1e6;

FoundLayouts search_all(const TrainConfig& config, double max_error, double memory_share) {
  return LayoutSearch(config, make_slow_gpu())
      .find(8, [](const RunRow&) { return prior_means(); },
            {.memory_share = memory_share, .max_error = max_error, .dp_formats = true});
}

void expect_state_of_engine(bool has_experts) {
  const TrainConfig base = make_small_config(has_experts);
  const GpuSpec gpu = make_slow_gpu();
  const LayoutSearch search(base, gpu);
  int compared = 0;
  for (const Layout& layout : search_all(base, .1, kAnyMemory).fitting) {
    const RunRow& row = layout.row;
    if (row.pp > 1) continue;  // a stage's own share of the tables
    const TrainConfig config = search.config_in(layout);
    const ModelLayout layout_of_rank(config.model, int(row.tp), 0, {int(row.ep), 0});
    const double experts = double(layout_of_rank.experts().count);
    EXPECT_NEAR(rank_weights(row).experts, experts, 1e-9 * experts)
        << "tp " << row.tp << " ep " << row.ep;
    const auto expert_dp = int64_t(row.dp / row.ep);
    const MemoryEstimate engine(config, true);
    // Gradients of experts without copies are in both of the engine's sums.
    const double twice = layout.formats.zero == 2 && expert_dp == 1 ? 4 * experts : 0;
    const double expected =
        -twice + rank_weights(row).dense * engine.state(config.parallel.dp).total() +
        experts * engine.state(expert_dp).total() + engine.gradient_window_bytes();
    EXPECT_NEAR(state_bytes(row, layout.formats) / expected, 1,
                layout.formats.zero == 2 ? .05 : 1e-9)
        << "zero " << layout.formats.zero << " " << config.parallel.codec << " dp " << row.dp;
    ++compared;
  }
  EXPECT_GT(compared, 50);
}

TEST(LayoutFormats, StateIsTheEngines) {
  expect_state_of_engine(false);
}

TEST(LayoutFormats, StateOfExpertsIsTheEngines) {
  expect_state_of_engine(true);
}

using Cost = std::tuple<double, double, double>;  // seconds, GiB, error

std::vector<Cost> front_of(std::vector<Cost> costs) {
  std::ranges::sort(costs);
  std::vector<Cost> front;
  for (const Cost& cost : costs) {
    const auto& [time, memory, error] = cost;
    const bool is_beaten = std::ranges::any_of(front, [&](const Cost& other) {
      return std::get<1>(other) <= memory && std::get<2>(other) <= error;
    });
    if (!is_beaten) front.push_back(cost);
  }
  return front;
}

/// Costs of a row in every combination of stage and formats, without regard to what sites it has.
void add_all_formats(const RunRow& row, double tp_sums, double max_error, double max_gib,
                     std::vector<Cost>& costs) {
  const GpuSpec gpu = make_slow_gpu();
  const StepWork work = work_of(row, gpu);
  const LayoutExchanges exchanges = exchanges_of(row, gpu, work, tp_sums);
  const double working = working_bytes(row);
  const auto allowed = [&](bool of_dp) {
    std::vector<Wire> wires = searched_formats(of_dp);
    std::erase_if(wires, [&](const Wire& wire) {
      return !wire.is_exact() && wire.error_bound() > max_error;
    });
    return wires;
  };
  const std::vector<Wire> wires = allowed(false), dp_wires = allowed(true), none{Wire{}};
  std::vector<int> stages{1};
  if (row.dp > 1) stages.push_back(0);
  if (row.dp > 1 && !splits_backward(row.schedule)) stages.push_back(2);
  for (const int zero : stages) {
    const bool has_dp = row.dp > 1 && zero > 0;
    for (const Wire& tp : row.tp > 1 ? wires : none)
      for (const Wire& ep : row.ep > 1 ? wires : none)
        for (const Wire& pp : row.pp > 1 ? wires : none)
          for (const Wire& gradients : has_dp ? dp_wires : none)
            for (const Wire& weights : has_dp ? dp_wires : none) {
              LayoutFormats formats{zero, {}};
              formats.codec = {.attention = tp,
                               .experts = ep,
                               .gradients = gradients,
                               .weights = weights,
                               .stages = pp};
              const double gib = (working + state_bytes(row, formats)) / kGiB;
              if (gib > max_gib) continue;
              const StepWork in_formats = work_in_formats(row, gpu, work, exchanges, formats);
              costs.emplace_back(step_time(in_formats, prior_means()).total, gib,
                                 error_of(formats.codec));
            }
  }
}

TEST(LayoutFormats, SearchFindsTheFrontOfAllCombinations) {
  for (const bool has_experts : {false, true}) {
    const TrainConfig base = make_small_config(has_experts);
    for (const double max_error : {0.0, .01, .1}) {
      const double share = .6, max_gib = share * make_slow_gpu().memory_bytes / kGiB;
      std::vector<Cost> expected, found;
      // Every row has a layout that fits any memory.
      const RunRow* last = nullptr;
      const FoundLayouts any = search_all(base, 0, kAnyMemory);
      std::vector<const RunRow*> rows;
      for (const Layout& layout : any.fitting) rows.push_back(&layout.row);
      const auto key = [](const RunRow* row) {
        return std::tuple(row->tp, row->pp, row->ep, row->mbs, row->vpp, row->schedule,
                          row->recompute);
      };
      std::ranges::sort(rows, {}, key);
      for (const RunRow* row : rows) {
        if (last && key(row) == key(last)) continue;
        last = row;
        add_all_formats(*row, has_experts ? 1 : 2, max_error, max_gib, expected);
      }
      for (const Layout& layout : pareto_front(search_all(base, max_error, share).fitting))
        found.emplace_back(layout.time.total, layout.memory_gib, layout.error);
      EXPECT_EQ(found, front_of(expected)) << "experts " << has_experts << ", error " << max_error;
      EXPECT_GT(found.size(), 3u);
    }
  }
}

TEST(LayoutFormats, EveryLayoutIsAJobFile) {
  for (const bool has_experts : {false, true}) {
    const TrainConfig base = make_small_config(has_experts);
    bool has_stage[3] = {};
    const GpuSpec gpu = make_slow_gpu();
    const FoundLayouts found = search_all(base, .1, .92);
    for (const Layout& layout : found.fitting) {
      const TrainConfig config = LayoutSearch(base, gpu).config_in(layout);
      EXPECT_EQ(config.parallel.zero, layout.formats.zero);
      EXPECT_EQ(CodecPolicy::parse(config.parallel.codec), layout.formats.codec);
      has_stage[config.parallel.zero] = true;
    }
    EXPECT_TRUE(has_stage[1] && has_stage[2]);
    EXPECT_GT(found.fitting.size(), 50u);
  }
}

TEST(LayoutFormats, GradientsAreDividedIfMemoryIsShort) {
  const TrainConfig base = make_small_config(false);
  EXPECT_EQ(search_all(base, 0, 2).fitting.front().formats.zero, 1);
  bool is_divided = false;
  for (double share = .9; share > .2; share -= .02)
    is_divided |= search_all(base, 0, share).fitting.front().formats.zero == 2;
  EXPECT_TRUE(is_divided);
}

TEST(LayoutFormats, LargerErrorIsNoSlower) {
  const TrainConfig base = make_small_config(false);
  double last = 1e9;
  for (const double max_error : {0.0, .005, .02, .1}) {
    const Layout best = search_all(base, max_error, .92).fitting.front();
    EXPECT_LE(best.time.total, last);
    EXPECT_LE(best.error, max_error);
    last = best.time.total;
  }
}

}  // namespace
}  // namespace tandem::plan
