#include "engine/model/stage.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "engine/model/branch.h"
#include "engine/model/head.h"
#include "engine/model/initialize.h"
#include "engine/model/step_load.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {
namespace {

const TransformerOptions& checked(const ModelConfig& config, const TransformerOptions& options) {
  if (options.batch < 1) {
    throw InvalidArgument(fmt::format("batch {}: expected at least 1", options.batch));
  }
  if (options.seq < 1 || options.seq > config.max_seq) {
    throw InvalidArgument(
        fmt::format("seq {}: expected between 1 and max_seq = {}", options.seq, config.max_seq));
  }
  return options;
}

/// Elements of a matrix of one row.
Tensor to_vector(const Tensor& row) {
  return Tensor(row.data(), row.dtype(), {row.elements()}, row.device());
}

void check_tokens(const char* what, std::span<const int32_t> values, int64_t expected,
                  int32_t lowest, int64_t vocab) {
  if (int64_t(values.size()) != expected) {
    throw InvalidArgument(
        fmt::format("{}: {} values: expected batch x seq = {}", what, values.size(), expected));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < lowest || values[i] >= vocab) {
      throw InvalidArgument(fmt::format("{}: {} at position {}: expected {} to {} (vocab {})", what,
                                        values[i], i, lowest, vocab - 1, vocab));
    }
  }
}

}  // namespace

class Stage::Impl {
 public:
  Impl(Communicator& tp, const ModelConfig& config, const TransformerOptions& options,
       const StageLayers& layers)
      : context_(tp, config, checked(config, options), layers),
        dnorms_(context_.make(DType::f32, context_.layout.branches_per_layer, config.hidden)) {
    if (layers.embedding || owns_tied()) embedding_.emplace(context_);
    if (layers.head) {
      head_.emplace(context_);
      residual_gradient();
    }
    make_experts();
    for (const BranchLayout& branch : context_.layout.branches) add_branch(branch);
    if (config.moe_layers() == 0) return;
    load_.emplace(context_, options.step.empty() ? std::vector<Communicator*>{&context_.experts}
                                                 : options.step);
  }

  void forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
               MicrobatchState& m) {
    check_no_pending("forward", m);
    const int64_t num_values = context_.options.batch * context_.options.seq;
    if (embedding_ || !tokens.empty()) {
      check_tokens("tokens", tokens, num_values, -1, context_.config.vocab);
    }
    set_tokens(context_, context_.take_rows(tokens), embedding_.has_value(), m);
    if (head_) {
      check_tokens("targets", targets, num_values, -1, context_.config.vocab);
      m.target_upload.run(context_.exec,
                          Tensor::of(context_.take_rows(targets), {1, context_.tokens}), m.targets);
    }
    if (m.residuals[0].dims() == 0) throw InvalidArgument("forward: expected set_input before");
    m.is_filled = true;
    if (load_) load_->begin(m);
    const FlatRangeCallback await = std::exchange(await_, nullptr);
    const auto use = [&](FlatRange range) {
      if (await && range.count > 0) await(range);
    };
    const auto use_norm = [&](size_t i) {  // before a branch, or the head's
      if (i < branches_.size() || head_) use({first_dense(i), norm_elements(i)});
    };
    use(dense(0, first_dense(0)));
    if (context_.layers.embedding) embedding_->forward(to_vector(m.tokens), m.residuals[0]);
    use_norm(0);
    if (const auto next = norm_before(0, m)) {
      rms_norm_forward(context_.exec, m.residuals[0], next->weight, context_.config.stream_eps(),
                       next->x_norm, next->inverse_rms);
    }
    for (size_t i = 0; i < branches_.size(); ++i) {
      use(dense(first_dense(i) + norm_elements(i), first_dense(i + 1)));
      use(expert_range(i));
      use_norm(i + 1);
      const Tensor &x = m.residuals[i], &y = m.residuals[i + 1];
      ExpertLoad* counted = m.load && !m.load->is_shared ? &m.load->load : nullptr;
      branches_[i].forward(x, y, m.branches[i], counted, norm_before(i + 1, m));
    }
    const size_t last = branches_.size();
    if (head_) use(dense(first_dense(last) + norm_elements(last), after_layers().end()));
    if (head_) head_->forward(to_vector(m.targets), *m.head);
  }

  double take_loss() { return head_ ? head_->take_loss() : 0; }

  /// `is_split`: weight gradients of the branches' GEMMs are left to backward_weight.
  void backward(MicrobatchState& m, float scale, bool is_split, const FlatRangeCallback& ready) {
    if (!m.is_filled) throw InvalidArgument("backward: expected a forward pass before");
    residual_gradient();
    check_no_pending("backward", m);
    // All memory before any kernel that waits for peers.
    if (is_split) context_.recomputed->weight_passes.begin(context_, m);
    const ModelLayout& layout = context_.layout;
    const auto report = [&](FlatRange range) {
      if (ready && range.count > 0) ready(range);
    };
    if (m.load) load_->end(*m.load);
    if (head_) {
      head_->backward(m.residuals.back(), to_vector(m.targets), scale, *m.head, dx_, clear_norm(0));
      add_norms({&layout.final_norm, 1});
      m.has_embedding_pass = owns_tied();
    } else if (context_.rounds_gradient()) {
      cast(context_.exec, dx_, context_.rounded_gradient);
    }
    report(after_layers());
    const auto per_layer = size_t(layout.branches_per_layer);
    // Branches whose norms' gradients are summed over the ranks, and that are reported, together.
    const size_t together = context_.tp.size() == 1 && context_.gradients.is_flat() ? 1 : per_layer;
    std::array<int64_t, 2> norms{};
    for (size_t branch = branches_.size(); branch-- > 0;) {
      if ((branch + 1) % per_layer == 0) {
        recompute_layer(context_, branches_, m, int64_t(branch / per_layer));
      }
      const size_t norm = branch % together;
      backward_branch(m, branch, clear_norm(norm), is_split);
      norms[norm] = layout.branches[branch].begin;
      report(expert_range(branch));
      if (norm > 0) continue;
      if (layout.branches[branch].has_norm()) add_norms(std::span(norms).first(together));
      report(dense(first_dense(branch), first_dense(branch + together)));
    }
    if (has_embedding_gradient()) {
      embedding_->backward(to_vector(m.tokens), context_.rounded(dx_));
    }
    if (dlogits_replace_logits(context_.exec)) m.is_filled = false;
    if (!owns_tied()) report(dense(0, first_dense(0)));
  }

  void backward_input(MicrobatchState& m, float scale) {
    check_no_pending("backward_input", m);
    backward(m, scale, true, {});
    m.has_weight_pass = true;
  }

  void backward_weight(MicrobatchState& m, const FlatRangeCallback& ready) {
    if (!std::exchange(m.has_weight_pass, false)) {
      throw InvalidArgument("backward_weight: expected backward_input before");
    }
    const auto report = [&](FlatRange range) {
      if (ready && range.count > 0) ready(range);
    };
    report(after_layers());
    const auto per_layer = size_t(context_.layout.branches_per_layer);
    for (size_t branch = branches_.size(); branch-- > 0;) {
      branches_[branch].backward_weight(m.branches[branch]);
      context_.recomputed->weight_passes.end(context_, m, branch);
      report(expert_range(branch));
      if (branch % per_layer > 0) continue;
      report(dense(first_dense(branch), first_dense(branch + per_layer)));
    }
    if (!owns_tied()) report(dense(0, first_dense(0)));
  }

  void backward_embedding(MicrobatchState& m, const Tensor& dx, const FlatRangeCallback& ready) {
    if (!std::exchange(m.has_embedding_pass, false)) {
      throw InvalidArgument("backward_embedding: expected a backward pass with a tied head before");
    }
    head_->backward_weight(*m.head);
    embedding_->backward(to_vector(m.tokens), dx);
    if (ready) ready(dense(0, first_dense(0)));
  }

  const Tensor& residual_gradient() {
    if (dx_.dims() > 0) return dx_;
    dx_ = *dx_memory_.emplace(context_.make(context_.options.residual_gradient,
                                            context_.local_rows.count, context_.config.hidden));
    return dx_;
  }
  void set_residual_gradient(const Tensor& gradient) {
    check_residual("gradient", gradient, context_.options.residual_gradient);
    if (head_) throw InvalidArgument("set_residual_gradient: expected a stage without head");
    dx_ = gradient;
  }

  void set_input(MicrobatchState& m, const Tensor& input) const {
    check_residual("input", input, DType::f32);
    if (context_.layers.embedding) {
      throw InvalidArgument("set_input: expected a stage without embedding");
    }
    m.residuals[0] = input;
  }

  void await_parameters(FlatRangeCallback await) { await_ = std::move(await); }

  /// On the host: a GPU may have no room for all weights in f32.
  Tensor staging() {
    const int64_t elements = context_.layout.size;
    if (!staging_) staging_.emplace(size_t(elements) * sizeof(float));
    return staging_->view(DType::f32, {elements});
  }
  void end_staging() { staging_.reset(); }

  void begin_step(int64_t aux_losses) {
    context_.begin_step();
    if (load_) load_->begin_step(aux_losses);
  }
  void share_load() {
    if (load_) load_->share();
  }
  double aux_loss() const { return load_ ? load_->aux_loss() : 0; }
  std::optional<ExpertCounts> counts() const {
    if (!load_) return {};
    return load_->counts();
  }
  void adjust_router_bias() {
    if (load_) load_->adjust_router_bias();
  }

  size_t shared_activation_bytes() const {
    return context_.recomputed->bytes() + (head_ ? head_->bytes() : 0);
  }

  ModelContext context_;
  std::unique_ptr<BranchExperts> experts_;

 private:
  /// Before the branches: on GPUs the algorithms of the router's GEMMs are saved, for equal bits in
  /// later runs, with those of the operators made next.
  void make_experts() {
    const auto& branches = context_.layout.branches;
    const auto first = std::ranges::find_if(branches, &BranchLayout::moe);
    if (first != branches.end()) experts_ = std::make_unique<BranchExperts>(context_, *first);
  }

  /// Operators are shared by all branches of a kind and created with the first of them.
  void add_branch(const BranchLayout& b) {
    auto& products = products_[branch_kind(b)];
    if (b.has_products() && !products) products = std::make_unique<BranchProducts>(context_, b);
    branches_.emplace_back(context_, products.get(), b.moe ? experts_.get() : nullptr, b);
  }

  void backward_branch(MicrobatchState& m, size_t i, const Tensor& dnorm, bool is_split) {
    const Tensor balance = load_ ? load_->balance(m, context_.layout.branches[i]) : Tensor();
    branches_[i].backward(m.residuals[i], dx_, dnorm, m.branches[i], balance, is_split);
  }

  void check_residual(const char* what, const Tensor& given, DType dtype) const {
    const std::array shape{context_.local_rows.count, context_.config.hidden};
    if (given.dtype() == dtype && given.dims() == 2 && given.dim(0) == shape[0] &&
        given.dim(1) == shape[1] && given.contiguous() && given.device() == context_.exec.device) {
      return;
    }
    throw InvalidArgument(fmt::format("residual {} {}: expected {} [{}, {}] on the stage's device",
                                      what, given.describe(), name_of(dtype), shape[0], shape[1]));
  }
  bool owns_tied() const { return context_.layout.tied == TiedEmbedding::owner; }
  /// Whether backward passes add the gradients of its lookups.
  bool has_embedding_gradient() const {
    return context_.layers.embedding && context_.layout.tied == TiedEmbedding::none;
  }

  /// Pending passes read the activations and gradients of those before.
  static void check_no_pending(const char* pass, const MicrobatchState& m) {
    if (!m.has_weight_pass && !m.has_embedding_pass) return;
    throw InvalidArgument(
        fmt::format("{}: expected {} of the microbatch before", pass,
                    m.has_weight_pass ? "backward_weight" : "backward_embedding"));
  }
  /// Norm before a branch, or after the last one the head's, if the stage has it.
  std::optional<NextNorm> norm_before(size_t branch, const MicrobatchState& m) const {
    if (branch < branches_.size()) return branches_[branch].norm(m.branches[branch]);
    if (!head_) return {};
    return head_->norm(*m.head);
  }
  /// Elements of the norm before a branch, or the head's.
  int64_t norm_elements(size_t branch) const {
    const auto& all = context_.layout.branches;
    return branch < all.size() && !all[branch].has_norm() ? 0 : context_.config.hidden;
  }
  /// First element of a branch, or after the last branch; experts are elsewhere.
  int64_t first_dense(size_t branch) const {
    const auto& branches = context_.layout.branches;
    return branch < branches.size() ? branches[branch].begin : context_.layout.final_norm;
  }
  /// Final norm and head.
  FlatRange after_layers() const {
    return dense(context_.layout.final_norm, context_.layout.experts_begin);
  }
  static FlatRange dense(int64_t begin, int64_t end) { return {begin, end - begin}; }
  /// Elements of a branch's experts.
  FlatRange expert_range(size_t branch) const {
    const BranchLayout& b = context_.layout.branches[branch];
    if (!b.moe) return {};
    const int64_t begin = b.experts_in.offset;
    for (size_t i = branch + 1; i < context_.layout.branches.size(); ++i) {
      if (context_.layout.branches[i].moe) {
        return {begin, context_.layout.branches[i].experts_in.offset - begin};
      }
    }
    return {begin, context_.layout.experts_end - begin};
  }

  Tensor clear_norm(size_t i) {
    const Tensor row = dnorms_->rows(int64_t(i), 1);
    clear(context_.exec, row);
    return row;
  }

  /// Sums row i of dnorms_ over the ranks (each saw only its rows of the residual stream) and adds
  /// it to the gradient of the norm at offsets[i].
  void add_norms(std::span<const int64_t> offsets) {
    all_reduce(context_.tp, dnorms_->rows(0, int64_t(offsets.size())));
    for (size_t i = 0; i < offsets.size(); ++i) {
      context_.add_gradient(dnorms_->rows(int64_t(i), 1), {offsets[i], 1, context_.config.hidden});
    }
  }

  std::optional<Embedding> embedding_;
  std::optional<Head> head_;
  std::array<std::unique_ptr<BranchProducts>, kBranchKinds> products_;
  std::vector<Branch> branches_;
  std::optional<StepLoad> load_;  // with experts
  Tensor dx_;                     // residual_gradient(), without data before its first use
  std::optional<Activation> dx_memory_;
  Activation dnorms_;
  FlatRangeCallback await_;        // for the next forward pass
  std::optional<Memory> staging_;  // of new weights
};

Stage::Stage(Communicator& tp, const ModelConfig& config, const TransformerOptions& options,
             const StageLayers& layers)
    : impl_(std::make_unique<Impl>(tp, config, options, layers)) {}
Stage::~Stage() = default;

void Stage::initialize(uint64_t seed) {
  const ModelContext& c = impl_->context_;
  initialize_parameters(c.exec, c.layout, c.config, seed, parameter_staging());
  parameters_changed();
}

Tensor Stage::parameters() const {
  return impl_->context_.weights.values();
}
const WeightViews& Stage::weights() const {
  return impl_->context_.weights.views();
}
void Stage::end_staging() {
  impl_->end_staging();
}
GradientMemory& Stage::gradient_memory() {
  return impl_->context_.gradients;
}
Tensor Stage::parameter_staging() {
  if (parameters().data()) return parameters();
  if (gradients().data() && gradients().dtype() == DType::f32) return gradients();
  return impl_->staging();
}
void Stage::read_parameters(const Tensor& to) const {
  impl_->context_.weights.read(to);
}
Tensor Stage::embedding() const {
  return impl_->context_.weights.matrix(impl_->context_.layout.embedding);
}
Tensor Stage::gradients() const {
  return impl_->context_.gradients.values();
}
const Exec& Stage::exec() const {
  return impl_->context_.exec;
}
const std::vector<Parameter>& Stage::parameter_list() const {
  return impl_->context_.layout.parameters;
}
int64_t Stage::experts_begin() const {
  return impl_->context_.layout.experts_begin;
}
int64_t Stage::experts_end() const {
  return impl_->context_.layout.experts_end;
}
FlatWindow Stage::dense_window() const {
  const ModelLayout whole = impl_->context_.whole_layout(), &stage = impl_->context_.layout;
  return make_window(stage, {0, stage.experts_begin}, whole, {0, whole.experts_begin});
}
FlatWindow Stage::experts_window() const {
  const ModelLayout whole = impl_->context_.whole_layout(), &stage = impl_->context_.layout;
  return make_window(stage, stage.experts(), whole, whole.experts());
}
std::optional<FlatRange> Stage::tied_embedding() const {
  const ModelLayout& layout = impl_->context_.layout;
  if (layout.tied == TiedEmbedding::none) return {};
  return FlatRange{layout.embedding.offset, layout.embedding.rows * layout.embedding.columns};
}
std::optional<ExpertCounts> Stage::expert_counts() const {
  return impl_->counts();
}
void Stage::begin_step(int64_t aux_losses) {
  impl_->begin_step(aux_losses);
}
double Stage::aux_loss() const {
  return impl_->aux_loss();
}
void Stage::share_load() {
  impl_->share_load();
}
void Stage::adjust_router_bias() {
  impl_->adjust_router_bias();
}
void Stage::parameters_changed() {
  parameters_changed({0, impl_->context_.layout.size});
}
void Stage::parameters_changed(FlatRange range) {
  impl_->context_.weights.set(range, parameter_staging().narrow(0, range.begin, range.count));
  impl_->context_.weights_changed();
}
void Stage::await_parameters(FlatRangeCallback await) {
  impl_->context_.weights_changed();
  impl_->await_parameters(std::move(await));
}
void Stage::run_between_operators(std::function<void()> progress) {
  impl_->context_.between_operators = std::move(progress);
}

bool Stage::has_embedding() const {
  return impl_->context_.layers.embedding;
}

Microbatch Stage::make_microbatch() const {
  return Microbatch(make_state(impl_->context_, impl_->experts_.get(), true));
}
Microbatch Stage::make_microbatch_without_input() const {
  return Microbatch(make_state(impl_->context_, impl_->experts_.get(), false));
}
size_t Stage::shared_activation_bytes() const {
  return impl_->shared_activation_bytes();
}
Tensor Stage::residual() const {
  const ModelContext& c = impl_->context_;
  return Tensor(nullptr, DType::f32, {c.local_rows.count, c.config.hidden}, c.exec.device);
}
Tensor Stage::input(const Microbatch& microbatch) const {
  return microbatch.state_->residuals.front();
}
Tensor Stage::output(const Microbatch& microbatch) const {
  return microbatch.state_->residuals.back();
}
void Stage::set_input(Microbatch& microbatch, const Tensor& input) const {
  impl_->set_input(*microbatch.state_, input);
}
Tensor Stage::residual_gradient() {
  return impl_->residual_gradient();
}
void Stage::set_residual_gradient(const Tensor& gradient) {
  impl_->set_residual_gradient(gradient);
}
void Stage::enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                            Microbatch& microbatch) {
  impl_->forward(tokens, targets, *microbatch.state_);
}
void Stage::set_documents(std::span<const int32_t> starts, Microbatch& microbatch) const {
  tandem::set_documents(impl_->context_, starts, *microbatch.state_);
}
double Stage::take_loss() {
  return impl_->take_loss();
}
void Stage::backward(Microbatch& microbatch, float scale, const FlatRangeCallback& ready) {
  impl_->backward(*microbatch.state_, scale, false, ready);
}
void Stage::backward_input(Microbatch& microbatch, float scale) {
  impl_->backward_input(*microbatch.state_, scale);
}
void Stage::backward_weight(Microbatch& microbatch, const FlatRangeCallback& ready) {
  impl_->backward_weight(*microbatch.state_, ready);
}
void Stage::backward_embedding(Microbatch& microbatch, const Tensor& dx,
                               const FlatRangeCallback& ready) {
  impl_->backward_embedding(*microbatch.state_, dx, ready);
}

}  // namespace tandem
