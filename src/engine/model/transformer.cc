#include "engine/model/transformer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include "engine/model/branch.h"
#include "engine/model/expert_load.h"
#include "engine/model/head.h"
#include "kernels/elementwise.h"
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
Tensor vector_of(const Tensor& row) {
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

class Transformer::Impl {
 public:
  Impl(Communicator& tp, const ModelConfig& config, const TransformerOptions& options)
      : context_(tp, config, checked(config, options)),
        embedding_(context_),
        head_(context_),
        step_(options.step ? *options.step : context_.experts),
        own_(context_),
        dx_(context_.make(DType::f32, context_.own.count, config.hidden)),
        dnorms_(context_.make(DType::f32, context_.layout.branches_per_layer, config.hidden)) {
    if (context_.exec.on_gpu()) host_gradients_ = Memory(context_.gradient_memory.bytes());
    for (const BranchLayout& branch : context_.layout.branches) add_branch(branch);
    if (config.moe_layers() > 0) load_ = new_load();
  }

  double forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                 MicrobatchState& m) {
    check_tokens("tokens", tokens, context_.tokens, 0, context_.config.vocab);
    check_tokens("targets", targets, context_.tokens, -1, context_.config.vocab);
    const Exec& exec = context_.exec;
    copy(exec, Tensor::of(tokens, {1, context_.tokens}), m.tokens);
    copy(exec, Tensor::of(targets, {1, context_.tokens}), m.targets);
    m.is_filled = true;
    if (load_) begin_load(m);
    embedding_.forward(vector_of(m.tokens), m.residuals[0]);
    for (size_t i = 0; i < branches_.size(); ++i) {
      const Tensor &x = m.residuals[i], &y = m.residuals[i + 1];
      ExpertLoad* counted = m.load && !m.load->is_shared ? &m.load->load : nullptr;
      branches_[i].forward(x, y, m.branches[i], counted);
    }
    return head_.forward(m.residuals.back(), vector_of(m.targets), m.head);
  }

  void backward(MicrobatchState& m, float scale, const std::function<void(int64_t)>& ready) {
    if (!m.is_filled) throw InvalidArgument("backward: expected a forward pass before");
    const ModelLayout& layout = context_.layout;
    has_fetched_ = false;
    int64_t end = layout.size;
    const auto report = [&](int64_t begin) {
      if (!ready) return;
      fetch_gradients(begin, end);
      end = begin;
      ready(begin);
    };
    if (m.load && context_.config.aux_loss_coeff > 0) share(*m.load);
    head_.backward(m.residuals.back(), vector_of(m.targets), scale, m.head, dx_, clear_norm(0));
    add_norms({&layout.final_norm, 1});
    report(layout.final_norm);
    const size_t per_layer = size_t(layout.branches_per_layer);
    std::array<int64_t, 2> norms{};
    for (size_t layer = branches_.size() / per_layer; layer-- > 0;) {
      for (size_t i = per_layer; i-- > 0;) {
        const size_t branch = layer * per_layer + i;
        backward_branch(m, branch, clear_norm(i));
        norms[i] = layout.branches[branch].begin;
        if (layout.branches[branch].moe) report(layout.branches[branch].experts_in.offset);
      }
      add_norms(std::span(norms).first(per_layer));
      report(norms[0]);
    }
    embedding_.backward(vector_of(m.tokens), dx_);
    report(0);
    has_fetched_ = ready != nullptr;
  }

  std::span<float> gradients() {
    if (!has_fetched_) fetch_gradients(0, context_.layout.size);
    has_fetched_ = true;
    const Memory& host = context_.exec.on_gpu() ? host_gradients_ : context_.gradient_memory;
    return {reinterpret_cast<float*>(host.data()), size_t(context_.layout.size)};
  }

  void begin_step() {
    if (!load_) return;
    if (!step_load_) step_load_ = new_load();
    step_load_->clear();
    load_ = step_load_;
  }
  void share_load() {
    if (load_) share(*load_);
  }
  const ExpertLoad* load() const { return load_ ? &load_->load : nullptr; }
  MicrobatchState& own() { return own_; }

  /// Moves every expert's bias by the rate, up if its load is below the mean, down if above.
  void adjust_router_bias() {
    const float rate = float(context_.config.router_bias_update_rate);
    for (const BranchLayout& b : context_.layout.branches) {
      if (b.router_bias < 0) continue;
      const auto counts = load_->load.counts(b.moe_layer);
      const double mean =
          std::accumulate(counts.begin(), counts.end(), 0.0) / double(counts.size());
      float* bias = context_.weights.values().data() + b.router_bias;
      for (size_t e = 0; e < counts.size(); ++e) {
        bias[e] += counts[e] < mean ? rate : counts[e] > mean ? -rate : 0.0f;
      }
    }
  }

  ModelContext context_;

 private:
  std::shared_ptr<CountedLoad> new_load() const {
    const ModelConfig& c = context_.config;
    return std::make_shared<CountedLoad>(
        CountedLoad{ExpertLoad(c.moe_layers(), c.experts, context_.options.routed)});
  }

  /// Counts only this microbatch, unless the step is counted as a whole.
  void begin_load(MicrobatchState& m) {
    if (!step_load_) {
      if (!m.load) m.load = new_load();
      m.load->clear();
      load_ = m.load;
    }
    m.load = load_;
  }

  /// Collective over the step's ranks.
  void share(CountedLoad& counted) {
    if (counted.is_shared) return;
    counted.load.share(step_);
    counted.is_shared = true;
  }

  /// Operators are shared by all branches of a kind and created with the first of them.
  void add_branch(const BranchLayout& b) {
    auto& products = products_[kind_of(b)];
    if (b.has_products() && !products) products = std::make_unique<BranchProducts>(context_, b);
    if (b.moe && !experts_) experts_ = std::make_unique<BranchExperts>(context_);
    branches_.emplace_back(context_, products.get(), b.moe ? experts_.get() : nullptr, b);
  }

  void backward_branch(MicrobatchState& m, size_t i, const Tensor& dnorm) {
    const ModelConfig& c = context_.config;
    const BranchLayout& b = context_.layout.branches[i];
    std::vector<float> balance;
    if (b.moe && c.aux_loss_coeff > 0)
      balance = m.load->load.balance(b.moe_layer, c.aux_loss_coeff, c.top_k);
    branches_[i].backward(m.residuals[i], dx_, dnorm, m.branches[i], balance);
  }

  /// Adds gradients [begin, end) to those in host memory and clears them on the GPU. On a CPU rank
  /// they are in host memory.
  void fetch_gradients(int64_t begin, int64_t end) {
    if (!context_.exec.on_gpu()) return;
    constexpr int64_t kChunk = 1 << 20;
    fetched_.resize(size_t(std::min(kChunk, context_.layout.size)));
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t count = std::min(kChunk, end - at);
      copy(context_.exec, context_.gradient(at, count), Tensor::of(fetched_.data(), {count}));
      auto* const sums = reinterpret_cast<float*>(host_gradients_.data()) + at;
      for (int64_t i = 0; i < count; ++i) sums[i] += fetched_[size_t(i)];
    }
    clear(context_.exec, context_.gradient(begin, end - begin));
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
      const Tensor row = dnorms_->rows(int64_t(i), 1);
      const Tensor sum = context_.gradient_memory.view(DType::f32, {1, context_.config.hidden},
                                                       size_t(offsets[i]) * sizeof(float));
      add(context_.exec, sum, row, sum);
    }
  }

  Embedding embedding_;
  Head head_;
  std::array<std::unique_ptr<BranchProducts>, kBranchKinds> products_;
  std::unique_ptr<BranchExperts> experts_;
  std::vector<Branch> branches_;
  Communicator& step_;
  MicrobatchState own_;
  /// Counts returned by `load`: the step's, once one has begun, or those of the last forward pass.
  std::shared_ptr<CountedLoad> load_, step_load_;
  Activation dx_, dnorms_;
  Memory host_gradients_;       // GPU ranks: for optimizers and checkpoints
  std::vector<float> fetched_;  // a chunk of them
  bool has_fetched_ = true;
};

Transformer::Transformer(Communicator& tp, const ModelConfig& config,
                         const TransformerOptions& options)
    : impl_(std::make_unique<Impl>(tp, config, options)) {}
Transformer::~Transformer() = default;

void Transformer::initialize(uint64_t seed) {
  initialize_parameters(impl_->context_.layout, impl_->context_.config, seed, parameters());
  parameters_changed();
}

std::span<float> Transformer::parameters() {
  return impl_->context_.weights.values();
}
std::span<float> Transformer::gradients() {
  return impl_->gradients();
}
const std::vector<Parameter>& Transformer::parameter_list() const {
  return impl_->context_.layout.parameters;
}
int64_t Transformer::experts_begin() const {
  return impl_->context_.layout.experts_begin;
}
const ExpertLoad* Transformer::load() const {
  return impl_->load();
}
void Transformer::begin_step() {
  impl_->begin_step();
}
void Transformer::share_load() {
  impl_->share_load();
}
void Transformer::adjust_router_bias() {
  impl_->adjust_router_bias();
}
void Transformer::parameters_changed() {
  impl_->context_.weights.refresh();
}

double Transformer::forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  return impl_->forward(tokens, targets, impl_->own());
}
void Transformer::backward(float scale, const std::function<void(int64_t begin)>& ready) {
  impl_->backward(impl_->own(), scale, ready);
}
Microbatch Transformer::make_microbatch() const {
  return Microbatch(std::make_unique<MicrobatchState>(impl_->context_));
}
double Transformer::forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                            Microbatch& microbatch) {
  return impl_->forward(tokens, targets, *microbatch.state_);
}
void Transformer::backward(Microbatch& microbatch, float scale,
                           const std::function<void(int64_t begin)>& ready) {
  impl_->backward(*microbatch.state_, scale, ready);
}

Microbatch::Microbatch(std::unique_ptr<MicrobatchState> state) : state_(std::move(state)) {}
Microbatch::~Microbatch() = default;
Microbatch::Microbatch(Microbatch&&) noexcept = default;
Microbatch& Microbatch::operator=(Microbatch&&) noexcept = default;

}  // namespace tandem
