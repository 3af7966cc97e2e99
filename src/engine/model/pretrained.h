// Trained model on disk: config.json and the files of weights (weight_files.h), in Hugging Face's
// layout.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "engine/model/config.h"
#include "engine/model/transformer.h"
#include "engine/model/weight_files.h"
#include "engine/model/weight_writer.h"

namespace tandem {

/// Hashes of the model's configuration and weights; changes if either does. Throws IoError.
std::string model_identity(const ModelConfig& config, const WeightFiles& weights);

/// Throws IoError naming the tensor unless the files have all tensors that the model reads, in
/// these shapes, and no other: a layer missing in config.json, or a bias, would change the result.
void require_same_tensors(const ModelConfig& config, const WeightFiles& weights);

/// Index of the first element that is NaN or infinite. `values`: f32 or bf16, contiguous, on the
/// host.
std::optional<size_t> first_not_finite(const Tensor& values);

/// Reads this rank's shards of parameters, f32, bf16 or f16 on disk or e4m3, whose codes are
/// multiplied by their scales: only its rows and columns, those in bf16 without a detour through
/// f32 if the weights are in bf16. Errors are IoErrors naming the tensor: it is missing, has
/// another shape or a non-finite element.
class ParameterReader {
 public:
  /// `files` must outlive the reader. `pins`: as of WeightWriter.
  ParameterReader(const WeightFiles& files, const Exec& exec, bool pins = true);
  /// Reads one parameter to views of its local_range, on this thread's kernel threads.
  void read(const Parameter& p, const WeightViews& to);
  /// Bytes of files that the shards read so far take, without scales.
  int64_t bytes() const { return bytes_; }

 private:
  const WeightFiles& files_;
  WeightWriter writer_;
  int64_t bytes_ = 0;
};

/// Reads this rank's shard of every parameter into a flat array, as a ParameterReader. Any thread.
void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     const Exec& exec, const WeightViews& to);
void load_parameters(const WeightFiles& files, const std::vector<Parameter>& parameters,
                     const Exec& exec, const WeightViews& to);

}  // namespace tandem
