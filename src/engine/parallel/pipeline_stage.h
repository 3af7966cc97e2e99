// Seam between the pipeline's runner (engine/parallel/pipeline.h) and the passes that it runs:
// those of a model's stage, or in benchmarks passes of known duration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/exec.h"
#include "engine/model/stage.h"
#include "tandem/tensor.h"

namespace tandem {

/// Passes of one chunk of a rank. A slot stores what the passes of one microbatch share; slots are
/// numbered from 0 and reused.
class PipelineStage {
 public:
  virtual ~PipelineStage() = default;

  virtual Exec exec() const { return {}; }
  /// Shape, dtype and device of every message between stages; without data.
  virtual Tensor message() const = 0;
  /// Appends a slot.
  virtual void add_slot() = 0;
  /// Transfers of a Stage. `set_input` is called before the forward passes of all stages but the
  /// first, `set_residual_gradient` before the backward passes of all but the last.
  virtual void set_input(int slot, const Tensor& input) = 0;
  virtual Tensor output(int slot) const = 0;
  virtual void set_residual_gradient(const Tensor& gradient) = 0;
  virtual Tensor residual_gradient() = 0;

  virtual void set_documents(std::span<const int32_t> /*starts*/, int /*slot*/) {}
  virtual void enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                               int slot) = 0;
  virtual void backward(int slot, float scale, const FlatRangeCallback& ready) = 0;
  virtual void backward_input(int slot, float scale) = 0;
  virtual void backward_weight(int slot, const FlatRangeCallback& ready) = 0;
  virtual double take_loss() = 0;
  /// Bytes of the slots' activations and of what they share.
  virtual size_t activation_bytes() const { return 0; }

  /// The stage whose tied embedding is to be shared with another one; nullptr: it has none.
  virtual Stage* tied_stage() { return nullptr; }
  /// Stage::backward_embedding, only with a tied embedding.
  virtual void backward_embedding(int slot, const Tensor& dx, const FlatRangeCallback& ready);
};

/// The stages must outlive the result.
std::vector<std::unique_ptr<PipelineStage>> pipeline_stages(const std::vector<Stage*>& stages);

}  // namespace tandem
