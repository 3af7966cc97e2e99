#include "engine/plan/cost/activations.h"

#include <algorithm>
#include <array>
#include <vector>

#include "engine/model/recompute.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"

namespace tandem {
namespace {

/// Rows that CPU ranks allocate for experts, over those that arrive: memory that grows leaves room.
constexpr double kExpertRoom = 1.25;
/// Rows that pad an expert's on GPUs.
constexpr double kExpertPadding = 127;

/// Sizes of a rank, in bytes or elements.
struct Sizes {
  Sizes(const TrainConfig& c, bool gpus)
      : config(c),
        model(c.model),
        on_gpus(gpus),
        element(c.train.dtype == "f32" ? 4 : 2),
        tp(double(c.parallel.tp)),
        tokens(double(microbatch_size(c.parallel, c.train)) * double(c.train.seq)),
        residual(tokens / tp * 4 * double(model.hidden)) {}

  const TrainConfig& config;
  const ModelConfig& model;
  bool on_gpus;
  double element, tp;
  double tokens;    ///< of a microbatch
  double residual;  ///< bytes of the residual stream
};

/// Bytes of a branch's activations, by what recomputes them (engine/model/microbatch.cc).
struct BranchBytes {
  double x_norm = 0, inverse_rms = 0, hidden = 0, inner = 0, log_sums = 0, routing = 0, experts = 0;
  double gradients = 0;  ///< of a split backward pass

  double all() const {
    return x_norm + inverse_rms + hidden + inner + log_sums + routing + experts;
  }
  double saved(Recompute mode) const {
    if (mode == Recompute::none) return all();
    return mode == Recompute::selective ? inverse_rms + hidden + routing : 0;
  }
  /// Bytes of a backward pass whose weight gradients come later.
  double pending(Recompute mode) const {
    return gradients + (mode == Recompute::none || gradients == 0 ? 0 : x_norm + inner);
  }
};

double expert_bytes(const Sizes& s) {
  const double hidden = double(s.model.hidden), ffn = double(s.model.ffn_per_expert()) / s.tp,
               top_k = double(s.model.top_k), ep = double(s.config.parallel.ep);
  if (!s.on_gpus) return kExpertRoom * s.tokens * top_k * (hidden + 3 * ffn) * s.element;
  const double local = double(s.model.experts) / ep;
  const double rows = ep * s.tokens * std::min(top_k, local) + kExpertPadding * local;
  return rows * (hidden + 2 * ffn) * s.element;
}

BranchBytes branch_bytes(const Sizes& s, bool attention, double ffn, bool experts) {
  const ModelConfig& m = s.model;
  const double heads = attention ? double(m.heads) : 0, head = double(m.head_dim),
               kv = attention ? double(m.kv_heads) * head : 0;
  const bool has_gate = experts && m.shared_expert_gate;  // a row of every rank
  const double in = heads * head + 2 * kv + 2 * ffn + (has_gate ? s.tp : 0),
               out = heads * head + ffn,
               unnormalized = m.qk_norm && !s.on_gpus ? heads * head + kv : 0;
  BranchBytes bytes;
  bytes.x_norm = s.tokens / s.tp * double(m.hidden) * s.element;
  bytes.inverse_rms = s.tokens / s.tp * 4;
  bytes.hidden = s.tokens * (in + unnormalized) / s.tp * s.element;
  bytes.inner = s.tokens * out / s.tp * s.element;
  bytes.log_sums = s.tokens * heads / s.tp * 4;
  if (in > 0) bytes.gradients = s.tokens * (double(m.hidden) + in / s.tp) * s.element;
  if (!experts) return bytes;
  bytes.routing = s.tokens / s.tp * 4 * double(m.experts + 2 * m.top_k);
  bytes.experts = expert_bytes(s);
  return bytes;
}

std::vector<BranchBytes> layer_branches(const Sizes& s, int64_t layer) {
  const ModelConfig& m = s.model;
  if (m.parallel_block) return {branch_bytes(s, true, double(m.ffn), false)};
  const bool experts = m.is_moe(layer);
  return {branch_bytes(s, true, 0, false),
          branch_bytes(s, false, double(experts ? m.shared_ffn : m.ffn), experts)};
}

/// Logits and the final norm. `is_tied`: to the embedding of another stage.
double head_bytes(const Sizes& s, bool is_tied) {
  const double logits = s.tokens * double(s.model.vocab) / s.tp;
  const bool has_gradient = is_tied && !s.on_gpus;
  return s.tokens / s.tp * (double(s.model.hidden) * s.element + 4) +
         logits * (s.on_gpus ? s.element : 4) + s.tokens * 3 * 4 +
         (has_gradient ? logits * s.element : 0);
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

double stage_bytes(const Sizes& s, const StageLayers& layers, const schedule::PipelineShape& shape,
                   int stage) {
  const RecomputedLayers recompute{parse_recompute(s.config.train.recompute),
                                   s.config.train.recompute_layers};
  const bool is_tied = s.model.tie_word_embeddings && layers.embedding != layers.head;
  const InFlight flight{saved_microbatches(shape, stage, is_tied), in_flight(shape, stage).pending};
  double microbatch = s.tokens * (s.config.data.document_mask ? 12 : 8) +
                      s.residual * (layers.embedding ? 1 : 0),
         pending = 0;
  // Recomputed by a layer with attention, an MLP, or experts, each the largest.
  std::array<double, 3> shared{};
  double shared_residual = 0;
  for (int64_t i = 0; i < layers.count; ++i) {
    const Recompute mode = recompute.of(i);
    const std::vector<BranchBytes> branches = layer_branches(s, layers.first + i);
    const bool has_shared_residual = mode == Recompute::full && branches.size() > 1;
    microbatch += s.residual * (has_shared_residual ? 1 : double(branches.size()));
    if (has_shared_residual) shared_residual = s.residual;
    for (size_t j = 0; j < branches.size(); ++j) {
      const BranchBytes& bytes = branches[j];
      microbatch += bytes.saved(mode);
      pending += bytes.pending(mode);
      double& of_kind = shared[bytes.experts > 0 ? 2 : j];
      of_kind = std::max(of_kind, bytes.all() - bytes.saved(mode));
    }
  }
  double all = shared[0] + shared[1] + shared[2] + shared_residual;
  if (layers.head) {
    microbatch += head_bytes(s, is_tied);
    const bool has_gradient = !s.on_gpus && !is_tied;
    all += has_gradient ? s.tokens * double(s.model.vocab) / s.tp * s.element : 0;
  }
  return all + flight.saved * microbatch + flight.pending * pending;
}

}  // namespace

int saved_microbatches(const schedule::PipelineShape& shape, int stage, bool is_tied) {
  if (is_tied && stage > 0 && stage + 1 == shape.stages()) return saved_by_tied_head(shape);
  return in_flight(shape, stage).saved;
}

double rank_activation_bytes(const TrainConfig& config, int pp_rank, bool on_gpus) {
  const schedule::PipelineShape shape = pipeline_shape(config.parallel, config.train);
  const std::vector<StageLayers> layers = pipeline_layers(config.parallel, config.model.layers);
  const Sizes sizes(config, on_gpus);
  double bytes = 0;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const int stage = schedule::stage_of(shape, pp_rank, chunk);
    bytes += stage_bytes(sizes, layers[size_t(stage)], shape, stage);
  }
  return bytes;
}

}  // namespace tandem
