#include "engine/parallel/pipeline_stage.h"

#include <deque>
#include <stdexcept>

namespace tandem {
namespace {

class ModelStage final : public PipelineStage {
 public:
  ModelStage(Stage& stage, bool owns_input) : stage_(stage), owns_input_(owns_input) {}

  Exec exec() const override { return stage_.exec(); }
  Tensor message() const override { return stage_.residual(); }
  void add_slot() override {
    microbatches_.push_back(owns_input_ ? stage_.make_microbatch()
                                        : stage_.make_microbatch_without_input());
  }
  void set_input(int slot, const Tensor& input) override {
    stage_.set_input(microbatches_[size_t(slot)], input);
  }
  Tensor output(int slot) const override { return stage_.output(microbatches_[size_t(slot)]); }
  void set_residual_gradient(const Tensor& gradient) override {
    stage_.set_residual_gradient(gradient);
  }
  Tensor residual_gradient() override { return stage_.residual_gradient(); }

  void set_documents(std::span<const int32_t> starts, int slot) override {
    stage_.set_documents(starts, microbatches_[size_t(slot)]);
  }
  void enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                       int slot) override {
    stage_.enqueue_forward(tokens, targets, microbatches_[size_t(slot)]);
  }
  void backward(int slot, float scale, const FlatRangeCallback& ready) override {
    stage_.backward(microbatches_[size_t(slot)], scale, ready);
  }
  void backward_input(int slot, float scale) override {
    stage_.backward_input(microbatches_[size_t(slot)], scale);
  }
  void backward_weight(int slot, const FlatRangeCallback& ready) override {
    stage_.backward_weight(microbatches_[size_t(slot)], ready);
  }
  double take_loss() override { return stage_.take_loss(); }
  size_t activation_bytes() const override {
    size_t bytes = stage_.shared_activation_bytes();
    for (const Microbatch& each : microbatches_) bytes += each.bytes();
    return bytes;
  }

  Stage* tied_stage() override { return stage_.tied_embedding() ? &stage_ : nullptr; }
  void backward_embedding(int slot, const Tensor& dx, const FlatRangeCallback& ready) override {
    stage_.backward_embedding(microbatches_[size_t(slot)], dx, ready);
  }

 private:
  Stage& stage_;
  const bool owns_input_;
  std::deque<Microbatch> microbatches_;
};

}  // namespace

void PipelineStage::backward_embedding(int, const Tensor&, const FlatRangeCallback&) {
  throw std::logic_error("backward_embedding: the stage has no tied embedding");
}

std::vector<std::unique_ptr<PipelineStage>> pipeline_stages(const std::vector<Stage*>& stages) {
  std::vector<std::unique_ptr<PipelineStage>> passes;
  for (Stage* stage : stages) {
    passes.push_back(std::make_unique<ModelStage>(*stage, stage->has_embedding()));
  }
  return passes;
}

}  // namespace tandem
