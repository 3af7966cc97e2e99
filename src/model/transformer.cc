#include "model/transformer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "model/branch.h"
#include "model/head.h"
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
        dx_(DType::f32, context_.own.count, config.hidden),
        dnorms_(DType::f32, context_.layout.branches_per_layer, config.hidden) {
    const auto& branches = context_.layout.branches;
    for (int i = 0; i < context_.layout.branches_per_layer; ++i) {
      operators_.push_back(std::make_unique<BranchOperators>(context_, branches[size_t(i)]));
    }
    for (size_t i = 0; i < branches.size(); ++i) {
      branches_.emplace_back(context_, *operators_[i % operators_.size()], branches[i]);
    }
    for (size_t i = 0; i <= branches.size(); ++i) {
      residuals_.emplace_back(DType::f32, context_.own.count, config.hidden);
    }
  }

  double forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
    check_tokens("tokens", tokens, context_.tokens, 0, context_.config.vocab);
    check_tokens("targets", targets, context_.tokens, -1, context_.config.vocab);
    tokens_.assign(tokens.begin(), tokens.end());
    targets_.assign(targets.begin(), targets.end());
    embedding_.forward(tokens_, residuals_[0]);
    for (size_t i = 0; i < branches_.size(); ++i) {
      branches_[i].forward(residuals_[i], residuals_[i + 1]);
    }
    return head_.forward(residuals_.back(), targets_);
  }

  void backward(float scale, const std::function<void(int64_t)>& ready) {
    if (tokens_.empty()) throw InvalidArgument("backward: expected a forward pass before");
    const ModelLayout& layout = context_.layout;
    const auto report = [&](int64_t begin) {
      if (ready) ready(begin);
    };
    head_.backward(residuals_.back(), targets_, scale, dx_, clear_norm(0));
    add_norms({&layout.final_norm, 1});
    report(layout.final_norm);
    const size_t per_layer = size_t(layout.branches_per_layer);
    std::array<int64_t, 2> norms{};
    for (size_t layer = branches_.size() / per_layer; layer-- > 0;) {
      for (size_t i = per_layer; i-- > 0;) {
        const size_t branch = layer * per_layer + i;
        branches_[branch].backward(residuals_[branch], dx_, clear_norm(i));
        norms[i] = layout.branches[branch].begin;
      }
      add_norms(std::span(norms).first(per_layer));
      report(norms[0]);
    }
    embedding_.backward(tokens_, dx_);
    report(0);
  }

  ModelContext context_;

 private:
  std::span<float> norm_row(size_t i) {
    const int64_t hidden = context_.config.hidden;
    return {dnorms_->as<float>() + int64_t(i) * hidden, size_t(hidden)};
  }
  std::span<float> clear_norm(size_t i) {
    const auto row = norm_row(i);
    std::ranges::fill(row, 0.0f);
    return row;
  }

  /// Row i of dnorms_, summed over the ranks (each saw its own rows of the residual stream), is
  /// added to the gradient of the norm at offsets[i].
  void add_norms(std::span<const int64_t> offsets) {
    all_reduce(context_.tp, dnorms_->rows(0, int64_t(offsets.size())));
    for (size_t i = 0; i < offsets.size(); ++i) {
      float* gradient = reinterpret_cast<float*>(context_.gradient_memory.data()) + offsets[i];
      const auto row = norm_row(i);
      for (size_t j = 0; j < row.size(); ++j) gradient[j] += row[j];
    }
  }

  Embedding embedding_;
  Head head_;
  std::vector<std::unique_ptr<BranchOperators>> operators_;
  std::vector<Branch> branches_;
  std::vector<Activation> residuals_;  ///< before each branch, and after the last
  Activation dx_, dnorms_;
  std::vector<int32_t> tokens_, targets_;
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
  return {reinterpret_cast<float*>(impl_->context_.gradient_memory.data()),
          size_t(impl_->context_.layout.size)};
}
const std::vector<Parameter>& Transformer::parameter_list() const {
  return impl_->context_.layout.parameters;
}
void Transformer::parameters_changed() {
  impl_->context_.weights.refresh();
}

double Transformer::forward(std::span<const int32_t> tokens, std::span<const int32_t> targets) {
  return impl_->forward(tokens, targets);
}
void Transformer::backward(float scale, const std::function<void(int64_t begin)>& ready) {
  impl_->backward(scale, ready);
}

}  // namespace tandem
