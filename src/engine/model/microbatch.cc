#include "engine/model/microbatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/model/branch.h"
#include "engine/model/stage.h"
#include "tandem/error.h"

namespace tandem {

namespace {

bool is_saved(Recompute mode, program::Life life) {
  return mode == Recompute::none || (mode == Recompute::selective && life == program::Life::saved);
}

Activation make_value(const ModelContext& c, const BranchLayout& l, size_t id) {
  const program::Value& value = l.program.values[id];
  const int64_t columns = l.columns[id].count, rows = value.rows == program::Rows::one ? 1
                                                      : value.rows == program::Rows::local
                                                          ? c.local_rows.count
                                                          : c.tokens;
  const DType dtype = value.dtype.value_or(c.options.dtype);
  return value.by_columns ? c.make(dtype, columns, rows) : c.make(dtype, rows, columns);
}

/// Makes the values of a branch for which `is_here(life)`; the others are those of `shared`, or
/// none.
template <typename IsHere>
BranchActivations make_activations(const ModelContext& c, const BranchLayout& l,
                                   const IsHere& is_here, const BranchActivations& shared) {
  BranchActivations made;
  made.values = shared.values;
  for (size_t i = 0; i < l.program.values.size(); ++i) {
    const program::Value& value = l.program.values[i];
    if (value.range_of >= 0 || value.life == program::Life::scratch || !is_here(value.life))
      continue;
    made.values[i] = *made.memory.emplace_back(make_value(c, l, i));
  }
  program::set_ranges(l, made.values);
  if (!l.moe) return made;
  if (is_here(program::Life::recomputed)) made.expert_memory = std::make_unique<MoeBatch>();
  made.experts = made.expert_memory ? made.expert_memory.get() : shared.experts;
  return made;
}

int64_t layer_of(const ModelContext& c, size_t branch) {
  return int64_t(branch) / c.layout.branches_per_layer;
}

void check_documents(const ModelContext& c, std::span<const int32_t> starts) {
  const int64_t positions = c.options.batch * c.options.seq;
  if (int64_t(starts.size()) != positions) {
    throw InvalidArgument(
        fmt::format("documents: {} values: expected batch x seq = {}", starts.size(), positions));
  }
  for (int64_t i = 0, begin = 0; i < positions; ++i) {
    const int64_t position = i % c.options.seq, start = starts[size_t(i)];
    if (position == 0 || start == position) begin = position;
    if (start == begin) continue;
    throw InvalidArgument(fmt::format(
        "documents: position {} of a sequence is of one that begins at {}: expected {} or {}",
        position, start, begin, position));
  }
}

}  // namespace

WeightPass::WeightPass(const ModelContext& c, const BranchLayout& l, bool has_activations)
    : dy(c.make(c.options.dtype, c.tokens, c.config.hidden)),
      dhidden(c.make(c.options.dtype, c.tokens, l.in.rows)) {
  if (!has_activations) return;
  x_norm.emplace(c.make(c.options.dtype, c.local_rows.count, c.config.hidden));
  inner.emplace(c.make(c.options.dtype, c.tokens, l.out.columns));
}

size_t WeightPass::bytes() const {
  const size_t activations = x_norm ? (*x_norm)->bytes() + (*inner)->bytes() : 0;
  return dy->bytes() + dhidden->bytes() + activations;
}

size_t BranchActivations::bytes() const {
  size_t bytes = expert_memory ? expert_memory->bytes() : 0;
  for (const Activation& each : memory) bytes += each->bytes();
  return bytes;
}

RecomputedActivations::RecomputedActivations(const ModelContext& c) {
  for (size_t i = 0; i < c.layout.branches.size(); ++i) {
    const BranchLayout& l = c.layout.branches[i];
    const Recompute mode = c.options.recompute.of(layer_of(c, i));
    BranchActivations& of_kind = branches[branch_kind(l)];
    for (size_t j = 0; j < l.program.values.size(); ++j) {
      const bool is_scratch = l.program.values[j].life == program::Life::scratch;
      if (!is_scratch || of_kind.values[j].dims() > 0) continue;
      of_kind.values[j] = *scratch[branch_kind(l)].emplace_back(make_value(c, l, j));
    }
    if (mode == Recompute::none || !of_kind.memory.empty()) continue;
    of_kind = make_activations(
        c, l, [mode](program::Life life) { return !is_saved(mode, life); }, of_kind);
    if (mode != Recompute::full || c.layout.branches_per_layer == 1 || residual) continue;
    residual.emplace(c.make(DType::f32, c.local_rows.count, c.config.hidden));
  }
}

size_t RecomputedActivations::bytes() const {
  size_t bytes = weight_passes.bytes() + (residual ? (*residual)->bytes() : 0);
  for (const BranchActivations& each : branches) bytes += each.bytes();
  return bytes;
}

WeightPasses::Free& WeightPasses::free_of(const ModelContext& c, size_t branch) {
  const bool has_activations = c.options.recompute.of(layer_of(c, branch)) != Recompute::none;
  return free_[branch_kind(c.layout.branches[branch])][size_t(has_activations)];
}

void WeightPasses::begin(const ModelContext& c, MicrobatchState& m) {
  for (size_t i = 0; i < m.branches.size(); ++i) begin(c, m, i);
}

void WeightPasses::begin(const ModelContext& c, MicrobatchState& m, size_t branch) {
  const BranchLayout& l = c.layout.branches[branch];
  if (!l.has_products()) return;
  Free& free = free_of(c, branch);
  BranchActivations& saved = m.branches[branch];
  if (free.empty()) {
    const bool has_activations = c.options.recompute.of(layer_of(c, branch)) != Recompute::none;
    free.push_back(std::make_unique<WeightPass>(c, l, has_activations));
    bytes_ += free.back()->bytes();
  }
  saved.weight_pass = std::move(free.back());
  free.pop_back();
  if (!saved.weight_pass->x_norm) return;
  saved.values[program::kXNorm] = *saved.weight_pass->x_norm;
  saved.values[program::kInner] = *saved.weight_pass->inner;
  program::set_ranges(l, saved.values);
}

void WeightPasses::end(const ModelContext& c, MicrobatchState& m, size_t branch) {
  BranchActivations& saved = m.branches[branch];
  if (!saved.weight_pass) return;
  if (saved.weight_pass->x_norm) {
    const BranchLayout& l = c.layout.branches[branch];
    const program::Values& shared = c.recomputed->branches[branch_kind(l)].values;
    for (const program::ValueId id : {program::kXNorm, program::kInner}) {
      saved.values[size_t(id)] = shared[size_t(id)];
    }
    program::set_ranges(l, saved.values);
  }
  free_of(c, branch).push_back(std::move(saved.weight_pass));
}

HeadLogits::HeadLogits(const ModelContext& c, int64_t rows)
    : logits(c.make(c.logits_dtype(), rows, c.layout.vocab)),
      maxima(c.make(DType::f32, 1, rows)),
      sums(c.make(DType::f32, 2, rows)) {}

HeadActivations::HeadActivations(const ModelContext& c)
    : HeadLogits(c, c.options.head_rows > 0 ? 0 : c.tokens),
      x_norm(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      inverse_rms(c.make(DType::f32, 1, c.local_rows.count)) {
  if (c.layout.tied == TiedEmbedding::none || c.exec.on_gpu()) return;
  dlogits.emplace(c.make(c.options.dtype, c.tokens, c.layout.vocab));
}

size_t HeadActivations::bytes() const {
  return HeadLogits::bytes() + x_norm->bytes() + inverse_rms->bytes() +
         (dlogits ? (*dlogits)->bytes() : 0);
}

MicrobatchState::MicrobatchState(const ModelContext& c, bool owns_input)
    : tokens(c.make(DType::i32, 1, c.tokens)),
      targets(c.make(DType::i32, 1, c.tokens)),
      token_upload(c.exec, tokens->bytes()),
      target_upload(c.exec, targets->bytes()) {
  if (c.layers.head) head.emplace(c);
  residuals.resize(c.layout.branches.size() + 1);
  for (size_t i = 0; i < residuals.size(); ++i) {
    const bool is_last = i == c.layout.branches.size();
    const Recompute mode = is_last ? Recompute::none : c.options.recompute.of(layer_of(c, i));
    if (!is_last) {
      const BranchLayout& l = c.layout.branches[i];
      branches.push_back(make_activations(
          c, l, [mode](program::Life life) { return is_saved(mode, life); },
          c.recomputed->branches[branch_kind(l)]));
    }
    const bool is_in_layer = i % size_t(c.layout.branches_per_layer) != 0;
    if (mode == Recompute::full && is_in_layer) {
      residuals[i] = *c.recomputed->residual;
    } else if (i > 0 || owns_input) {
      residuals[i] =
          *residual_memory.emplace_back(c.make(DType::f32, c.local_rows.count, c.config.hidden));
    }
  }
}

size_t MicrobatchState::bytes() const {
  size_t bytes = tokens->bytes() + targets->bytes() + (head ? head->bytes() : 0);
  if (document_starts) bytes += (*document_starts)->bytes();
  for (const Activation& each : residual_memory) bytes += each->bytes();
  for (const BranchActivations& each : branches) bytes += each.bytes();
  return bytes;
}

void set_tokens(const ModelContext& c, std::span<const int32_t> tokens, bool embeds,
                MicrobatchState& m) {
  const bool has_padding = c.config.moe_layers() > 0 &&
                           std::ranges::any_of(tokens, [](int32_t token) { return token < 0; });
  if (embeds || has_padding) {
    m.token_upload.run(c.exec, Tensor::of(tokens, {1, c.tokens}), m.tokens);
  }
  const Tensor all(m.tokens->data(), DType::i32, {c.tokens}, c.exec.device);
  const Tensor local =
      has_padding ? all.narrow(0, c.local_rows.begin, c.local_rows.count) : Tensor();
  for (BranchActivations& branch : m.branches) branch.padded_tokens = local;
}

void set_documents(const ModelContext& c, std::span<const int32_t> starts, MicrobatchState& m) {
  check_documents(c, starts);
  if (!m.document_starts) {
    m.document_starts.emplace(c.make(DType::i32, 1, int64_t(starts.size())));
    m.document_upload.emplace(c.exec, (*m.document_starts)->bytes());
  }
  m.document_upload->run(c.exec, Tensor::of(starts, {1, int64_t(starts.size())}),
                         *m.document_starts);
  for (BranchActivations& branch : m.branches) branch.document_starts = *m.document_starts;
}

Microbatch::Microbatch(std::unique_ptr<MicrobatchState> state) : state_(std::move(state)) {}
Microbatch::~Microbatch() = default;
size_t Microbatch::bytes() const {
  return state_->bytes();
}
Microbatch::Microbatch(Microbatch&&) noexcept = default;
Microbatch& Microbatch::operator=(Microbatch&&) noexcept = default;

}  // namespace tandem
