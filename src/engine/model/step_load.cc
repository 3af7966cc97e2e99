#include "engine/model/step_load.h"

#include <utility>

#include "engine/model/branch.h"

namespace tandem {
namespace {

Tensor number(const Memory& memory) {
  return memory.view(DType::u8, {int64_t(sizeof(double))});
}

}  // namespace

StepLoad::StepLoad(ModelContext& context, std::vector<Communicator*> axes)
    : context_(context),
      axes_(std::move(axes)),
      reported_(make_load()),
      aux_loss_sum_(sizeof(double), context.exec.device),
      aux_loss_(sizeof(double), context.exec.device),
      balance_(size_t(context.config.experts) * sizeof(float), context.exec.device) {}

std::shared_ptr<CountedLoad> StepLoad::make_load() const {
  const ModelConfig& c = context_.config;
  return std::make_shared<CountedLoad>(CountedLoad{
      ExpertLoad(context_.exec, c.moe_layers(), c.experts, axes_, context_.options.routed)});
}

/// Auxiliary loss of which a step has `losses`.
AuxLoss StepLoad::layer_loss(int64_t losses) const {
  const ModelConfig& c = context_.config;
  return {c.aux_loss_coeff / double(losses), c.experts, c.top_k};
}

double StepLoad::read(const Tensor& number) const {
  double value = 0;
  copy(context_.exec, number, Tensor(&value, DType::u8, {int64_t(sizeof(double))}));
  return value;
}

void StepLoad::begin_step(int64_t aux_losses) {
  if (!of_step_) of_step_ = make_load();
  of_step_->clear();
  reported_ = of_step_;
  aux_losses_ = aux_losses;
  clear(context_.exec, number(aux_loss_sum_));
}

void StepLoad::begin(MicrobatchState& m) {
  if (covers_step()) {
    m.load = of_step_;
    return;
  }
  if (!m.load || m.load == of_step_) m.load = make_load();
  m.load->clear();
  if (!of_step_) reported_ = m.load;
}

void StepLoad::end(CountedLoad& counted) {
  const bool has_loss = context_.config.aux_loss_coeff > 0;
  if (has_loss) share(counted);
  if (covers_step() || !of_step_) return;
  of_step_->load.add(counted.load);
  of_step_->is_shared = counted.is_shared;
  if (has_loss) {
    add_aux_losses(context_.exec, layer_loss(1), counted.load.layers(), number(aux_loss_sum_));
  }
}

void StepLoad::share() {
  share(*reported_);
}

void StepLoad::share(CountedLoad& counted) {
  if (counted.is_shared) return;
  counted.load.share();
  counted.is_shared = true;
}

double StepLoad::aux_loss() const {
  if (aux_losses_ > 1) return read(number(aux_loss_sum_)) / double(aux_losses_);
  clear(context_.exec, number(aux_loss_));
  add_aux_losses(context_.exec, layer_loss(1), reported_->load.layers(), number(aux_loss_));
  return read(number(aux_loss_));
}

ExpertCounts StepLoad::counts() const {
  return reported_->load.counts();
}

Tensor StepLoad::balance(const MicrobatchState& m, const BranchLayout& branch) const {
  if (!branch.moe || context_.config.aux_loss_coeff == 0) return {};
  const Tensor balance = balance_.view(DType::f32, {context_.config.experts});
  balance_gradient(context_.exec, layer_loss(aux_losses_), m.load->load.layer(branch.moe_layer),
                   balance);
  return balance;
}

/// Moves every expert's bias by the rate, up if its load is below the mean, down if above.
void StepLoad::adjust_router_bias() {
  const auto rate = float(context_.config.router_bias_update_rate);
  for (const BranchLayout& b : context_.layout.branches) {
    if (b.router_bias < 0) continue;
    tandem::adjust_router_bias(context_.exec, reported_->load.layer(b.moe_layer), rate,
                               context_.weights.vector(b.router_bias, context_.config.experts));
  }
}

}  // namespace tandem
