#include "engine/plan/cost/activations.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/system/machine.h"
#include "engine/model/codec_policy.h"
#include "engine/model/program/cost.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "gemm/gemm.h"
#include "overlap/attention/operator.h"

namespace tandem {
namespace {

/// Sizes of a rank.
struct RankSizes : program::Sizes {
  RankSizes(const ModelConfig& m, const ParallelConfig& parallel, const RunConfig& train, bool gpus)
      : Sizes{.model = m,
              .tokens = double(microbatch_tokens(parallel, train)),
              .tp = double(parallel.tp),
              .ep = double(parallel.ep),
              .element = train.dtype == "f32" ? 4.0 : 2.0,
              .on_gpus = gpus,
              .moe_save = parse_moe_save(train.moe_save),
              .is_fp8 = train.is_fp8()},
        head_rows(train.head_rows > 0 ? double(train.head_rows) : tokens),
        shares_logits(train.head_rows > 0),
        recompute{parse_recompute(train.recompute), train.recompute_layers},
        residual(tokens / tp * 4 * double(model.hidden)) {}

  double head_rows;    ///< whose logits are in memory at once
  bool shares_logits;  ///< microbatches have none of their own
  RecomputedLayers recompute;
  bool has_document_mask = false;
  double residual;  ///< bytes of the residual stream
};

/// Logits, and what the loss is computed from.
double logits_bytes(const RankSizes& s) {
  return s.head_rows * (double(s.model.vocab) / s.tp * (s.on_gpus ? s.element : 4) + 3 * 4);
}

/// The final norm, and logits unless microbatches share them. `is_tied`: to the embedding of
/// another stage.
double head_bytes(const RankSizes& s, bool is_tied) {
  const bool has_gradient = is_tied && !s.on_gpus;
  return s.tokens / s.tp * (double(s.model.hidden) * s.element + 4) +
         (s.shares_logits ? 0 : logits_bytes(s)) +
         (has_gradient ? s.tokens * double(s.model.vocab) / s.tp * s.element : 0);
}

/// Highest numbers of microbatches of a stage with saved activations, and of those with a pending
/// backward_weight.
struct InFlight {
  int saved = 0, pending = 0;
};
InFlight in_flight(const schedule::PipelineShape& shape, int stage) {
  const auto [rank, chunk] = schedule::position_of(shape, stage);
  InFlight now, highest;
  for (const schedule::PipelineAction& action : schedule::pipeline_actions(shape, rank)) {
    if (action.chunk != chunk) continue;
    now.saved += action.pass == schedule::PassKind::forward;
    now.pending += action.pass == schedule::PassKind::backward_input;
    highest = {std::max(highest.saved, now.saved), std::max(highest.pending, now.pending)};
    const bool is_weight = action.pass == schedule::PassKind::backward_weight;
    now.saved -= is_weight || action.pass == schedule::PassKind::backward;
    now.pending -= is_weight;
  }
  return highest;
}

/// Highest number of microbatches with saved activations in a last stage whose tied embedding the
/// first stage looks up: each is in flight until the gradients of its lookups have been added,
/// after the forward pass whose input the first stage made after sending them.
int saved_by_tied_head(const schedule::PipelineShape& shape) {
  using schedule::PassKind;
  const auto first = schedule::position_of(shape, 0),
             last = schedule::position_of(shape, shape.stages() - 1);
  const std::vector<schedule::PipelineAction> of_first = pipeline_actions(shape, first.rank);
  std::vector<int> uses(size_t(shape.microbatches), 2);
  int saved = 0, highest = 0;
  const auto end_use = [&](int microbatch) { saved -= --uses[size_t(microbatch)] == 0; };
  size_t at = 0;  // in of_first
  for (const schedule::PipelineAction& action : pipeline_actions(shape, last.rank)) {
    if (action.chunk != last.chunk || action.pass == PassKind::backward_input) continue;
    if (action.pass != PassKind::forward) {
      end_use(action.microbatch);
      continue;
    }
    highest = std::max(highest, ++saved);
    for (; at < of_first.size(); ++at) {
      const schedule::PipelineAction& other = of_first[at];
      if (other.chunk != first.chunk || other.pass == PassKind::backward_weight) continue;
      const bool is_forward = other.pass == PassKind::forward;
      if (is_forward && other.microbatch == action.microbatch) break;
      if (!is_forward) end_use(other.microbatch);
    }
  }
  return highest;
}

double stage_bytes(const RankSizes& s, const StageLayers& layers,
                   const schedule::PipelineShape& shape, int stage) {
  const bool is_tied = s.model.tie_word_embeddings && layers.embedding != layers.head;
  const InFlight flight{saved_microbatches(shape, stage, is_tied), in_flight(shape, stage).pending};
  double microbatch =
             s.tokens * (s.has_document_mask ? 12 : 8) + s.residual * (layers.embedding ? 1 : 0),
         pending = 0;
  // Recomputed by a layer with attention, an MLP, or experts, each the largest.
  std::array<double, 3> shared{};
  std::array<std::vector<program::BranchBytes>, 2> of_layer;  // without experts, and with
  double shared_residual = 0;
  for (int64_t i = 0; i < layers.count; ++i) {
    const Recompute mode = s.recompute.of(i);
    const bool is_moe = s.model.is_moe(layers.first + i);
    std::vector<program::BranchBytes>& branches = of_layer[size_t(is_moe)];
    if (branches.empty()) {
      for (const auto& branch : program::make_layer(s.model, layers.first + i).branches) {
        branches.push_back(branch_bytes(branch, s));
      }
    }
    const bool has_shared_residual = mode == Recompute::full && branches.size() > 1;
    microbatch += s.residual * (has_shared_residual ? 1 : double(branches.size()));
    if (has_shared_residual) shared_residual = s.residual;
    for (size_t j = 0; j < branches.size(); ++j) {
      const program::BranchBytes& bytes = branches[j];
      microbatch += bytes.saved_by(mode);
      pending += bytes.pending(mode);
      double& of_kind = shared[is_moe ? 2 * j : j];
      of_kind = std::max(of_kind, bytes.all() - bytes.saved_by(mode));
    }
  }
  double all = shared[0] + shared[1] + shared[2] + shared_residual;
  if (layers.head) {
    microbatch += head_bytes(s, is_tied);
    const bool has_gradient = !s.on_gpus && !is_tied;
    all += has_gradient ? s.head_rows * double(s.model.vocab) / s.tp * s.element : 0;
    if (s.shares_logits) all += logits_bytes(s) + 4 * s.head_rows;  // with their targets
  }
  return all + flight.saved * microbatch + flight.pending * pending;
}

double stage_scratch_bytes(const RankSizes& s, const RunConfig& train, const StageLayers& layers) {
  const auto hidden = double(s.model.hidden);
  const double rows = s.tokens / s.tp * hidden * s.element,
               all_rows = s.tokens * hidden * s.element;
  // The residual stream's gradient, and its rounded copy.
  const auto gradient = double(size_of(parse_dtype(train.residual_gradient)));
  double bytes = s.tokens / s.tp * hidden * (gradient + (gradient > s.element ? s.element : 0));
  if (layers.embedding) bytes += all_rows + rows;
  if (layers.head) bytes += rows;
  std::array<double, 3> branches{};  // with attention, an MLP, or experts
  for (int64_t i = 0; i < layers.count; ++i) {
    const bool is_moe = s.model.is_moe(layers.first + i);
    const program::LayerProgram layer = program::make_layer(s.model, layers.first + i);
    for (size_t j = 0; j < layer.branches.size(); ++j) {
      const program::BranchBytes of_branch = branch_bytes(layer.branches[j], s);
      double& of_kind = branches[is_moe ? 2 * j : j];
      of_kind = std::max(of_kind, of_branch.operands + of_branch.gradients);
    }
  }
  for (const double of_kind : branches) bytes += of_kind;
  if (!s.on_gpus || layers.count == 0) return bytes;
  return bytes + s.tokens * double(s.model.heads) / s.tp * double(s.model.head_dim) * 4;
}

}  // namespace

int saved_microbatches(const schedule::PipelineShape& shape, int stage, bool is_tied) {
  if (is_tied && stage > 0 && stage + 1 == shape.stages()) return saved_by_tied_head(shape);
  return in_flight(shape, stage).saved;
}

double rank_activation_bytes(const TrainConfig& config, int pp_rank, bool on_gpus) {
  const schedule::PipelineShape shape = pipeline_shape(config.parallel, config.train);
  const std::vector<StageLayers> layers = pipeline_layers(config.parallel, config.model.layers);
  RankSizes sizes(config.model, config.parallel, config.train, on_gpus);
  sizes.has_document_mask = config.data.document_mask;
  double bytes = 0;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const int stage = schedule::stage_of(shape, pp_rank, chunk);
    bytes += stage_bytes(sizes, layers[size_t(stage)], shape, stage);
  }
  return bytes;
}

double context_attention_bytes(const ModelConfig& model, const ParallelConfig& parallel,
                               const RunConfig& train) {
  if (parallel.cp == 1) return 0;
  const ContextShape shape{.batch = microbatch_size(parallel, train),
                           .seq = train.seq,
                           .heads = model.heads / parallel.tp,
                           .kv_heads = std::max<int64_t>(1, model.kv_heads / parallel.tp),
                           .head_dim = model.head_dim,
                           .dtype = train.dtype == "f32" ? DType::f32 : DType::bf16,
                           .wire = CodecPolicy::parse(parallel.codec).keys};
  const KernelThreads of_rank(threads_per_rank(ParallelDims(parallel).ranks()));
  return double(context_attention_bytes(shape, int(parallel.cp)));
}

double rank_scratch_bytes(const ModelConfig& model, const ParallelConfig& parallel,
                          const RunConfig& train, int pp_rank, bool on_gpus) {
  const schedule::PipelineShape shape = pipeline_shape(parallel, train);
  const std::vector<StageLayers> layers = pipeline_layers(parallel, model.layers);
  const RankSizes sizes(model, parallel, train, on_gpus);
  double bytes = 0;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const int stage = schedule::stage_of(shape, pp_rank, chunk);
    bytes += stage_scratch_bytes(sizes, train, layers[size_t(stage)]) +
             context_attention_bytes(model, parallel, train);
  }
  return bytes;
}

}  // namespace tandem
