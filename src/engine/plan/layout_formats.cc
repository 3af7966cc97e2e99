#include "engine/plan/layout_formats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "engine/plan/codecs/codec_search.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

/// Share of the memory's rate that kernels reach which encode or decode, in bytes read and written
/// (bench/results/h100x1/gpu-codecs.json; lossless: h100x2/pairs).
constexpr double kCodecRate = .8, kLosslessRate = .21;
/// Error feedback reads and writes a residual in f32.
constexpr double kResidualTraffic = 8;
constexpr double kActivation = 2, kGradient = 4;  // bytes

/// Elements that a rank sends when its copies reduce or gather all weights.
double sent_weights(const RunRow& row) {
  const RankWeights weights = rank_weights(row);
  const WeightCopies copies = weight_copies(row);
  return weights.dense * (1 - 1 / copies.dense) + weights.experts * (1 - 1 / copies.experts);
}

}  // namespace

double error_of(const CodecPolicy& codec) {
  double error = 0;
  for (const Wire& wire : {codec.attention, codec.mlp, codec.experts, codec.embeddings,
                           codec.gradients, codec.weights, codec.stages, codec.keys}) {
    if (!wire.is_exact()) error = std::max(error, wire.error_bound());
  }
  return error;
}

double parse_accuracy(std::string_view text) {
  if (text.ends_with('%')) {
    if (const auto share = parse_percentage(text)) return *share;
    throw InvalidArgument(fmt::format("expected {}", kPercentage));
  }
  const Wire wire = Wire::parse(text);
  return wire.is_exact() ? 0 : wire.error_bound();
}

double bytes_per_element(const Wire& wire, double element_bytes) {
  if (wire.is_none()) return element_bytes;
  return wire.bits_per_element(element_bytes == kGradient ? DType::f32 : DType::bf16) / 8;
}

double codec_rate(const Wire& wire, const GpuSpec& gpu) {
  return gpu.memory_rate * (wire.is_exact() ? kLosslessRate : kCodecRate);
}

double encoded_seconds(const Exchange& exchange, const Wire& wire, const GpuSpec& gpu) {
  if (wire.is_none()) return exchange.seconds;
  const double bytes = bytes_per_element(wire, exchange.element_bytes);
  const double kernels = exchange.codings * exchange.elements * (exchange.element_bytes + bytes) /
                         codec_rate(wire, gpu);
  return std::hypot(exchange.seconds * bytes / exchange.element_bytes, kernels);
}

LayoutExchanges exchanges_of(const RunRow& row, const GpuSpec& gpu, const StepWork& work,
                             double tp_sums) {
  LayoutExchanges all;
  const double tp_rate = row.tp <= gpu.host_gpus ? gpu.nvlink_rate : gpu.nic_rate;
  const double ep_rate = row.ep * row.tp > gpu.host_gpus ? gpu.nic_rate : gpu.nvlink_rate;
  // Two sums of the forward pass, in each a reduce-scatter and an all-gather, and as many in the
  // backward pass and in the recomputation; only reduce-scatters of forward passes are encoded.
  const double halves = 2 * (4 + 2 * work.recompute), encoded = tp_sums * (1 + work.recompute);
  const auto exchange = [](double seconds, double rate) {
    return Exchange{seconds, seconds * rate / kActivation, kActivation, 2};
  };
  all.tp = exchange(work.layer.tp * encoded / halves, tp_rate);
  all.tp_left = work.layer.tp - all.tp.seconds;
  all.ep = exchange(work.layer.ep / 2, ep_rate);  // dispatch and combine of the forward pass
  all.ep_left = work.layer.ep - all.ep.seconds;
  all.stages = exchange(work.pp, gpu.nic_rate);
  const double sent = sent_weights(row), weight_share = kActivation / (kActivation + kGradient);
  const double replicas = row.dp * row.cp;
  all.gradients = {work.dp * (1 - weight_share), sent, kGradient, 2};
  // A rank encodes its shard and decodes all others.
  all.weights = {work.dp * weight_share, sent, kActivation,
                 replicas > 1 ? replicas / (replicas - 1) : 1};
  return all;
}

StepWork work_in_formats(const RunRow& row, const GpuSpec& gpu, StepWork work,
                         const LayoutExchanges& exchanges, const LayoutFormats& formats) {
  const CodecPolicy& codec = formats.codec;
  const auto seconds = [&](const Exchange& exchange, const Wire& wire) {
    return encoded_seconds(exchange, wire, gpu);
  };
  work.layer.tp = exchanges.tp_left + seconds(exchanges.tp, codec.attention);
  work.layer.ep = exchanges.ep_left + seconds(exchanges.ep, codec.experts);
  work.pp = seconds(exchanges.stages, codec.stages);
  const RankWeights weights = rank_weights(row);
  if (!codec.gradients.is_exact())
    work.optimizer += kResidualTraffic * (weights.dense + weights.experts) / gpu.memory_rate;
  const double gradients = seconds(exchanges.gradients, codec.gradients);
  if (formats.zero == 0) {  // gradients are gathered in f32, and all ranks update all weights
    work.dp = 2 * gradients;
    const WeightCopies copies = weight_copies(row);
    work.optimizer *= (weights.dense + weights.experts) /
                      (weights.dense / copies.dense + weights.experts / copies.experts);
    return work;
  }
  const bool every_pass = formats.zero == 2;
  work.dp =
      gradients * (every_pass ? work.microbatches : 1) + seconds(exchanges.weights, codec.weights);
  if (every_pass) work.window_microbatches = work.microbatches;
  return work;
}

double state_bytes(const RunRow& row, const LayoutFormats& formats) {
  const CodecPolicy& codec = formats.codec;
  const bool has_f32 = !codec.weights.is_none();
  const RankWeights weights = rank_weights(row);
  const auto bytes = [&](double count, double copies) {
    const bool has_masters = !has_f32 || (copies > 1 && !codec.weights.is_exact());
    const double residuals = copies > 1 && !codec.gradients.is_exact() ? 8 : 0;
    return count * (2 + (has_f32 ? 4 : 0) + kGradient / (formats.zero == 2 ? copies : 1) +
                    (has_masters ? 12 : 8) / (formats.zero == 0 ? 1 : copies) + residuals);
  };
  const WeightCopies copies = weight_copies(row);
  // Gradients of the layers that a window has, and of the tables at both ends of the model.
  constexpr double kWindowLayers = 3;
  double window = 0;
  if (formats.zero == 2) {
    const double tables = row.vocab * row.hidden * vocabulary_tables(row) / row.tp;
    const double experts = copies.experts > 1 ? weights.experts : 0;  // others' stay whole
    const double layers = weights.dense + experts - tables;
    window =
        kGradient * (tables + layers * std::min(1.0, kWindowLayers / stage_layers(row).fullest));
  }
  return bytes(weights.dense, copies.dense) + bytes(weights.experts, copies.experts) + window;
}

}  // namespace tandem::plan
