#include "engine/plan/cost/step_work.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/plan/cost/rank_state.h"

namespace tandem::plan {
namespace {

constexpr double kUnitLatency = 1e-4;
constexpr double kElement = 2;  ///< bytes, bf16
/// Passes over a GEMM's activations and their gradients that round them to 8 bits, each way round.
constexpr double kCasts = 2;

struct Gemm {
  double m, n, k, count = 1;
};

/// Microbatch of a row, and how much of the forward pass runs again.
struct Dims : MicrobatchDims {
  double recompute = 0;
};

/// Share of layers that must be computed again: all, none, or what memory asks for if the row does
/// not say.
double recompute_share(const RunRow& row, const GpuSpec& gpu) {
  constexpr double kUsable = .9, kSelective = .1, kEverySecondGemm = .5;
  if (row.recompute == "full") return 1;
  if (row.recompute == "none") return 0;
  if (row.recompute.find("selective") != std::string::npos)
    return row.software.starts_with("torchtitan") ? kEverySecondGemm : kSelective;
  if (!row.recompute.empty()) return 0;  // norms, activations: cheap
  const double bytes = saved_bytes(row) * saved_layers(row);
  return std::clamp(1 - kUsable * gpu.memory_bytes / bytes, 0.0, 1.0);
}

std::array<Gemm, 2> ffn_gemms(const RunRow& row, const Dims& dims) {
  if (row.experts == 0) {
    return {Gemm{dims.tokens, dims.matrices * row.ffn / row.tp, row.hidden},
            Gemm{dims.tokens, row.hidden, row.ffn / row.tp}};
  }
  // Experts are whole, and the ranks of a TP group share the tokens; or all have parts of them.
  const double local = std::max(1.0, row.experts / row.ep);
  const double of_ffn = row.of_engine ? row.tp : 1, of_tokens = row.tp / of_ffn;
  const double rows = dims.tokens / of_tokens * (row.top_k + row.shared_experts) / local;
  return {Gemm{rows, dims.matrices * row.ffn / of_ffn, row.hidden, local},
          Gemm{rows, row.hidden, row.ffn / of_ffn, local}};
}

std::array<Gemm, 4> layer_gemms(const RunRow& row, const Dims& dims) {
  const auto [up, down] = ffn_gemms(row, dims);
  return {Gemm{dims.tokens, (dims.width + 2 * dims.kv_width) / row.tp, row.hidden},
          Gemm{dims.tokens, row.hidden, dims.width / row.tp}, up, down};
}

/// Bytes over a rank's link in an exchange of tokens with their experts: one copy for each other
/// host, or each expert if every routing travels.
double ep_seconds(const RunRow& row, const GpuSpec& gpu, const Dims& dims) {
  if (row.ep <= 1) return 0;
  const double tokens = dims.tokens / row.tp;
  const bool every_copy = row.notes.find("plain all-to-all") != std::string::npos;
  // A group of experts is of consecutive ranks, in this engine of every tp-th one.
  const double span = row.ep * (row.of_engine ? row.tp : 1);
  const double groups = every_copy ? row.ep : std::max(1.0, span / gpu.host_gpus);
  double copies = every_copy ? row.top_k : groups * (1 - std::pow(1 - 1 / groups, row.top_k));
  if (row.expert_hosts > 0 && !every_copy) copies = std::min(copies, row.expert_hosts);
  const bool across = span > gpu.host_gpus;
  const double away = across ? 1 - 1 / groups : 1 - 1 / row.ep;
  const double bytes = kElement * tokens * row.hidden * std::max(copies, 1.0) * away;
  constexpr double kExchanges = 4, kOverlapped = .35;
  const double exposed = row.notes.find("A2A overlap") != std::string::npos ? kOverlapped : 1;
  return exposed * kExchanges * bytes / (across ? gpu.nic_rate : gpu.nvlink_rate);
}

LayerWork layer_work(const RunRow& row, const GpuSpec& gpu, const Dims& dims) {
  const double passes = 3 + dims.recompute, rate = is_fp8(row) ? gpu.fp8_flops : gpu.bf16_flops;
  LayerWork work;
  for (const auto& [m, n, k, count] : layer_gemms(row, dims)) {
    work.gemm += count * passes * 2 * m * n * k / rate;
    if (is_fp8(row)) work.memory += kCasts * count * kElement * m * (n + k) / gpu.memory_rate;
    work.gemm_bytes += count * passes * kElement * (m * n + n * k + m * k) / gpu.memory_rate;
  }
  const double routed = row.experts > 0 ? 6 * row.top_k * row.hidden : 0;  // gather and combine
  const double elements = dims.tokens / row.tp *
                          (10 * row.hidden + 2 * (dims.width + 2 * dims.kv_width) +
                           1.5 * (1 + dims.matrices) * dims.ffn + routed);
  work.memory += passes * kElement * elements / gpu.memory_rate;
  work.attention =
      (3.5 + dims.recompute) * 2 * dims.tokens * row.seq * dims.width / row.tp / gpu.bf16_flops;
  work.launch = passes * kUnitLatency * (row.experts > 0 ? 8 : 1);
  const double activation = kElement * dims.tokens * row.hidden;
  if (row.tp > 1) {
    const double rate_of_group = row.tp <= gpu.host_gpus ? gpu.nvlink_rate : gpu.nic_rate;
    work.tp = (4 + 2 * dims.recompute) * 2 * activation * (row.tp - 1) / row.tp / rate_of_group;
  }
  if (row.cp > 1) {
    const double rate_of_group = row.tp * row.cp <= gpu.host_gpus ? gpu.nvlink_rate : gpu.nic_rate;
    work.cp = 6 * kElement * dims.tokens * dims.kv_width / row.tp * (row.cp - 1) / rate_of_group;
  }
  work.ep = ep_seconds(row, gpu, dims);
  return work;
}

/// Ring over `ranks`, of which `in_host` share a host.
WeightRing make_ring(double elements, double ranks, double in_host) {
  if (ranks <= 1) return {};
  return {elements * (ranks - 1) / ranks, ranks <= in_host ? 0 : in_host};
}

void add_gradient_sums(const RunRow& row, const GpuSpec& gpu, StepWork& work) {
  const auto [dense, experts] = rank_weights(row);
  const auto [ranks, expert_ranks] = weight_copies(row);
  const auto rings = weight_rings(row, gpu);
  const auto exchange = [&](double bytes) {
    return ring_seconds(rings[0], bytes, gpu) + ring_seconds(rings[1], bytes, gpu);
  };
  work.fsdp = row.sharding.find("FSDP") != std::string::npos;
  if (work.fsdp) {  // gathers for the forward and, unless kept, the backward pass; one sum
    const double gathers = row.sharding.find("grad_op") != std::string::npos ? 1 : 2;
    // Stages of a pipeline keep a step's weights, and sum gradients after the last microbatch.
    const double times = row.pp > 1 ? 1 : row.microbatches();
    work.dp = times * ((row.pp > 1 ? 1 : gathers) + 1) * exchange(kElement);
    work.dp_messages =
        times * work.stage_layers * 3 * std::log2(std::max(ranks, 2.0)) * kUnitLatency;
  } else {  // f32 gradients, bf16 weights
    work.dp = exchange(4) + exchange(kElement);
  }
  work.optimizer = 24 * (dense / ranks + experts / expert_ranks) / gpu.memory_rate;
}

}  // namespace

std::array<WeightRing, 2> weight_rings(const RunRow& row, const GpuSpec& gpu) {
  const auto [dense, experts] = rank_weights(row);
  const auto [ranks, expert_ranks] = weight_copies(row);
  const double in_host = std::clamp(gpu.host_gpus / row.tp, 1.0, ranks);
  return {make_ring(dense, ranks, in_host),
          make_ring(experts, expert_ranks,
                    std::max(1.0, in_host * (row.of_engine ? 1 : row.tp) / row.ep))};
}

double ring_seconds(const WeightRing& ring, double element_bytes, const GpuSpec& gpu) {
  const double rate = ring.adapters == 0 ? gpu.nvlink_rate
                                         : std::min(gpu.nvlink_rate, ring.adapters * gpu.nic_rate);
  return element_bytes * ring.elements / rate;
}

bool is_fp8(const RunRow& row) {
  return row.precision.starts_with("fp8");
}

StepWork work_of(const RunRow& row, const GpuSpec& gpu) {
  const Dims dims{microbatch_dims(row), recompute_share(row, gpu)};
  StepWork work;
  work.recompute = dims.recompute;
  work.layer = layer_work(row, gpu, dims);
  const StageLayers layers = stage_layers(row);
  work.mean_layers = layers.mean;
  work.stage_layers = layers.fullest;
  work.last_stage_layers = layers.last;
  constexpr double kLossBytes = 30;  // logits in bf16 and f32, softmax and gradient
  work.head_gemm = 3 * 2 * dims.tokens * row.hidden * row.vocab / row.tp / gpu.bf16_flops;
  work.head_bytes = dims.tokens * row.vocab / row.tp * kLossBytes / gpu.memory_rate;
  work.stages = row.pp;
  work.microbatches = row.microbatches();
  work.bubble = splits_backward(row.schedule)
                    ? split_schedule(row.schedule, int(row.pp), dims.recompute).idle /
                          ((3 + dims.recompute) * work.microbatches)
                    : (row.pp - 1) / (row.vpp * work.microbatches);
  if (row.pp > 1)
    work.pp = row.vpp * 2 * kElement * dims.tokens * row.hidden / row.tp / gpu.nic_rate;
  work.window_microbatches = std::min(work.microbatches, std::max(1.0, row.pp * (1 - 1 / row.vpp)));
  add_gradient_sums(row, gpu, work);
  work.octaves = std::log2(std::max(1.0, row.gpus / gpu.host_gpus));
  return work;
}

}  // namespace tandem::plan
