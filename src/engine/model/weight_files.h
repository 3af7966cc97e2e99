// Tensors of a model on disk: a folder's model.safetensors, or the files that its
// model.safetensors.index.json names. Nothing but headers is read until a tensor is.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/formats/safetensors.h"
#include "engine/model/fused_experts.h"
#include "engine/model/stored_slice.h"
#include "engine/model/weight_quantization.h"

namespace tandem {

/// Tensor and the file that it is in.
struct StoredTensor {
  const SafetensorsFile* file = nullptr;
  const SafetensorsEntry* entry = nullptr;
  const StoredSlice* slice = nullptr;  ///< of an expert in a tensor of several
  explicit operator bool() const { return file != nullptr; }
};

/// Text that says why `folder` holds no weights that are read: it is a file, or has only those of
/// other programs (pytorch_model.bin, an adapter, GGUF, also as the file itself) and the command
/// that converts them; empty: it has none.
std::string describe_other_weights(const std::string& folder);

class WeightFiles {
 public:
  /// Opens model.safetensors or, if there is none but an index, all files of the index. Throws
  /// IoError naming the file, and the tensor if the index and the files' headers differ on it, and
  /// ConfigError for a quantization_config that is not known.
  explicit WeightFiles(const std::string& folder);
  /// model.safetensors or the index.
  const std::string& path() const { return path_; }
  /// Tensors of all files, ascending by name; slices of fused ones (fused_tensors.h) in their
  /// place.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// Without a file if there is no tensor of this name.
  StoredTensor find(std::string_view name) const;
  /// Throws IoError unless there is a tensor of this name and shape.
  StoredTensor require(std::string_view name, std::span<const int64_t> shape) const;
  /// Scales of a tensor; without a file unless it is e4m3. Throws IoError if they are missing or do
  /// not fit it, and for a tensor that cannot have scales.
  StoredTensor require_scales(const StoredTensor& tensor) const;
  /// By the folder's config.json.
  const WeightQuantization& quantization() const { return quantization_; }
  /// Checks and hashes of all files (core/formats/safetensors.h).
  void verify() const;
  std::string header_hash() const;
  std::string identity() const;

 private:
  void open_index();
  /// Replaces fused tensors by their slices.
  void split_fused();
  /// Replaces tensors of experts (fused_experts.h) by the parameters in them.
  void split_experts();
  void add_expert_slices(const StoredTensor& whole, const StoredTensor& scales,
                         std::span<const ExpertSlice> slices, std::vector<StoredTensor>& split);

  std::string folder_, path_;
  WeightQuantization quantization_;
  std::vector<std::unique_ptr<const SafetensorsFile>> files_;
  std::vector<StoredTensor> tensors_;
  std::deque<SafetensorsEntry> slices_;  ///< of fused tensors
  std::deque<StoredSlice> strided_;
};

}  // namespace tandem
