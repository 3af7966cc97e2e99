#include "engine/model/weight_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "core/cpu/tasks.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/model/fused_tensors.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kWeightsName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kWeightMap = "weight_map";
/// Far above those of published models.
constexpr size_t kMaxIndexBytes = size_t{64} << 20;
constexpr size_t kMaxWeightFiles = 1000;

std::string_view name_of_tensor(const StoredTensor& tensor) {
  return tensor.entry->name;
}

/// Whether the name is of a file in the index's own folder.
bool is_file_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

/// File of each tensor.
using WeightMap = std::map<std::string, std::string>;

WeightMap parse_index(const std::string& path) {
  const auto root = parse_json(read_small_file(path, kMaxIndexBytes));
  if (!root.is_object() || !root.contains(kWeightMap) || !root[kWeightMap].is_object() ||
      root[kWeightMap].empty()) {
    throw IoError(
        fmt::format("{}: expected a JSON object with {}, an object of tensors and their files",
                    path, kWeightMap));
  }
  WeightMap map;
  for (const auto& [tensor, file] : root[kWeightMap].items()) {
    if (!file.is_string() || !is_file_name(file.get<std::string>())) {
      throw IoError(fmt::format(
          "{}: {}: '{}' is in {}: expected the name of a .safetensors file in this folder", path,
          kWeightMap, printable(tensor), printable(file.dump())));
    }
    map.emplace(tensor, file.get<std::string>());
  }
  return map;
}

/// Text on weights of llama.cpp: the file and the command that converts it.
std::string describe_gguf(const std::string& folder, const std::string& name) {
  return fmt::format(
      "holds GGUF ({}): expected a folder of config.json and safetensors: the published one, or, "
      "dequantized, what pip install gguf and python3 -c \"import sys, transformers as t; "
      "[c.from_pretrained(sys.argv[1], gguf_file=sys.argv[2]).save_pretrained(sys.argv[3]) "
      "for c in (t.AutoTokenizer, t.AutoModelForCausalLM)]\" {} {} {} writes",
      name, shell_quote(folder), shell_quote(name), shell_quote(folder + "/safetensors"));
}

bool is_gguf(const std::string& file) {
  constexpr std::string_view kMagic = "GGUF";
  std::ifstream stream(file, std::ios::binary);
  std::string begin(kMagic.size(), ' ');
  stream.read(begin.data(), std::streamsize(begin.size()));
  return stream && begin == kMagic;
}

/// Name of the first file of GGUF in a folder; empty if there is none.
std::string find_gguf(const std::string& folder, const std::vector<std::string>& names) {
  const auto found = std::ranges::find_if(names, [&](const std::string& name) {
    return name.ends_with(".gguf") && is_gguf(folder + "/" + name);
  });
  return found == names.end() ? "" : *found;
}

/// Tensor of experts; with scales the blocks of MXFP4.
struct StoredExperts {
  StoredTensor whole, scales;
};

/// Throws IoError unless the files have the tensor, or if it is of matrices its blocks and scales.
/// `by_rows`: the tensor's as of blocks.
StoredExperts find_experts(const WeightFiles& files, const ExpertTensor& tensor,
                           const ExpertTensor& by_rows) {
  const StoredTensor whole = files.find(tensor.name);
  std::vector<int64_t> scales_shape = by_rows.shape;
  scales_shape.back() /= kMxfp4Block;
  std::vector<int64_t> blocks_shape = scales_shape;
  blocks_shape.push_back(kMxfp4BlockBytes);
  const bool has_blocks = tensor.is_matrix && by_rows.shape.back() % kMxfp4Block == 0;
  const std::string expected = fmt::format("f32, bf16 or f16 [{}]", fmt::join(tensor.shape, ", "));
  if (whole) {
    const SafetensorsEntry& entry = *whole.entry;
    const bool has_values =
        entry.dtype == DType::f32 || entry.dtype == DType::bf16 || entry.dtype == DType::f16;
    if (entry.shape == tensor.shape && has_values) return {whole, {}};
    reject_tensor(whole.file->path(), entry.name,
                  fmt::format("{} [{}]: expected {}", name_of(entry.dtype),
                              fmt::join(entry.shape, ", "), expected));
  }
  const StoredTensor blocks = files.find(tensor.name + "_blocks"),
                     scales = files.find(tensor.name + "_scales");
  const auto in_blocks = [&](const char* suffix, const std::vector<int64_t>& shape) {
    return fmt::format("u8 {}{} [{}]", tensor.name, suffix, fmt::join(shape, ", "));
  };
  if (!has_blocks || (!blocks && !scales)) {
    throw IoError(fmt::format(
        "{}: tensor '{}' is missing: expected {}{}", files.path(), tensor.name, expected,
        has_blocks ? fmt::format(", or {} and {}", in_blocks("_blocks", blocks_shape),
                                 in_blocks("_scales", scales_shape))
                   : ""));
  }
  const auto check = [&](const StoredTensor& stored, const char* suffix,
                         const std::vector<int64_t>& shape) {
    if (!stored) {
      throw IoError(fmt::format("{}: tensor '{}{}' is missing: expected {}", files.path(),
                                tensor.name, suffix, in_blocks(suffix, shape)));
    }
    const SafetensorsEntry& entry = *stored.entry;
    if (entry.dtype == DType::u8 && entry.shape == shape) return;
    reject_tensor(stored.file->path(), entry.name,
                  fmt::format("{} [{}]: expected {}", name_of(entry.dtype),
                              fmt::join(entry.shape, ", "), in_blocks(suffix, shape)));
  };
  check(blocks, "_blocks", blocks_shape);
  check(scales, "_scales", scales_shape);
  return {blocks, scales};
}

}  // namespace

std::string describe_other_weights(const std::string& folder) {
  if (is_gguf(folder)) {
    const std::filesystem::path file = folder;
    const std::string parent = file.parent_path().string();
    return describe_gguf(parent.empty() ? "." : parent, file.filename().string());
  }
  if (std::error_code error; std::filesystem::is_regular_file(folder, error)) {
    return "a file: expected the folder of a model, with its config.json";
  }
  const std::string path = shell_quote(folder), merged = shell_quote(folder + "-merged");
  const std::vector<std::string> names = names_in(folder);
  const auto find = [&](std::string_view begin, std::string_view end) {
    const auto found = std::ranges::find_if(names, [&](const std::string& name) {
      return name.starts_with(begin) && name.ends_with(end);
    });
    return found == names.end() ? "" : *found;
  };
  if (find("adapter_config", ".json") == "adapter_config.json") {
    return fmt::format(
        "holds an adapter (adapter_config.json): expected the whole model, as after python3 -c "
        "\"import sys, peft, transformers as t; m = "
        "peft.AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]); "
        "m.merge_and_unload().save_pretrained(sys.argv[2]); "
        "t.AutoTokenizer.from_pretrained(m.peft_config['default'].base_model_name_or_path)"
        ".save_pretrained(sys.argv[2])\" {} {}",
        path, merged);
  }
  if (const std::string name = find("pytorch_model", ""); !name.empty()) {
    return fmt::format(
        "holds {}: expected model.safetensors, which python3 -c \"import sys, transformers as t; "
        "t.AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype='auto')"
        ".save_pretrained(sys.argv[1])\" {} writes",
        name, path);
  }
  const std::string gguf = find_gguf(folder, names);
  return gguf.empty() ? "" : describe_gguf(folder, gguf);
}

WeightFiles::WeightFiles(const std::string& folder)
    : folder_(folder),
      path_(folder + "/" + kWeightsName),
      quantization_(read_weight_quantization(folder)) {
  const std::string index = folder + "/" + kIndexName;
  if (!path_exists(path_) && path_exists(index)) {
    path_ = index;
    open_index();
  } else {
    if (!path_exists(path_)) {
      const std::string other = describe_other_weights(folder);
      if (!other.empty()) throw IoError(fmt::format("{}: {}", folder, other));
    }
    files_.push_back(std::make_unique<const SafetensorsFile>(path_));
    for (const SafetensorsEntry& entry : files_.front()->entries()) {
      tensors_.push_back({files_.front().get(), &entry});
    }
  }
  split_fused();
  std::ranges::sort(tensors_, {}, name_of_tensor);
  split_experts();
  const auto twice = std::ranges::adjacent_find(tensors_, {}, name_of_tensor);
  if (twice == tensors_.end()) return;
  reject_tensor(twice->file->path(), twice->entry->name,
                "is in the files twice: expected it in a fused tensor or by itself");
}

void WeightFiles::split_fused() {
  const std::string file = folder_ + "/config.json";
  const auto may_be_fused = [](const StoredTensor& tensor) {
    return tensor.entry->name.ends_with("qkv_proj.weight") ||
           tensor.entry->name.ends_with("gate_up_proj.weight");
  };
  if (std::ranges::none_of(tensors_, may_be_fused) || !path_exists(file)) return;
  const ModelConfig config = model_config_from_json(read_small_file(file), file);
  std::vector<StoredTensor> split;
  for (const StoredTensor& tensor : tensors_) {
    const SafetensorsEntry& whole = *tensor.entry;
    const std::vector<FusedSlice> slices = fused_slices(config, whole.name);
    if (slices.empty()) {
      split.push_back(tensor);
      continue;
    }
    int64_t rows = 0;
    for (const FusedSlice& slice : slices) rows += slice.rows;
    const std::vector<int64_t> expected{rows, config.hidden};
    if (whole.shape != expected || whole.dtype == DType::e4m3) {
      reject_tensor(tensor.file->path(), whole.name,
                    fmt::format("{} [{}]: expected f32, bf16 or f16 [{}]", name_of(whole.dtype),
                                fmt::join(whole.shape, ", "), fmt::join(expected, ", ")));
    }
    uint64_t begin = whole.begin;
    for (const FusedSlice& slice : slices) {
      const uint64_t bytes = (whole.end - whole.begin) / uint64_t(rows) * uint64_t(slice.rows);
      slices_.push_back(
          {slice.name, whole.dtype, {slice.rows, config.hidden}, begin, begin + bytes});
      split.push_back({tensor.file, &slices_.back()});
      begin += bytes;
    }
  }
  tensors_ = std::move(split);
}

void WeightFiles::split_experts() {
  constexpr std::string_view kOfExperts = ".experts.gate_up_proj";
  const std::string file = folder_ + "/config.json";
  const auto is_fused = [&](const StoredTensor& tensor) {
    return tensor.entry->name.find(kOfExperts) != std::string::npos;
  };
  if (std::ranges::none_of(tensors_, is_fused) || !path_exists(file)) return;
  const ModelConfig config = model_config_from_json(read_small_file(file), file);
  if (!config.fused_experts) return;
  std::vector<StoredTensor> split;
  std::unordered_set<std::string_view> replaced;
  for (int64_t layer = 0; layer < std::min(config.layers, int64_t(tensors_.size())); ++layer) {
    if (!config.is_moe(layer)) continue;
    const std::vector<ExpertTensor> blocks = expert_tensors(config, layer, ExpertOrder::by_rows);
    size_t i = 0;
    for (const ExpertTensor& tensor : expert_tensors(config, layer)) {
      const ExpertTensor& by_rows = blocks[i++];
      const StoredExperts found = find_experts(*this, tensor, by_rows);
      add_expert_slices(found.whole, found.scales, found.scales ? by_rows.slices : tensor.slices,
                        split);
      replaced.insert(found.whole.entry->name);
      if (found.scales) replaced.insert(found.scales.entry->name);
    }
  }
  std::erase_if(tensors_,
                [&](const StoredTensor& tensor) { return replaced.contains(tensor.entry->name); });
  tensors_.insert(tensors_.end(), split.begin(), split.end());
  std::ranges::sort(tensors_, {}, name_of_tensor);
}

void WeightFiles::add_expert_slices(const StoredTensor& whole, const StoredTensor& scales,
                                    std::span<const ExpertSlice> slices,
                                    std::vector<StoredTensor>& split) {
  for (const ExpertSlice& slice : slices) {
    strided_.push_back({whole.file, whole.entry, slice.first, slice.row_stride, slice.column_stride,
                        scales.file, scales.entry});
    // bf16 has all numbers of MXFP4 below 2^128.
    slices_.push_back({slice.name, scales ? DType::bf16 : whole.entry->dtype, slice.shape,
                       whole.entry->begin, whole.entry->end});
    split.push_back({whole.file, &slices_.back(), &strided_.back()});
  }
}

void WeightFiles::open_index() {
  const WeightMap map = parse_index(path_);
  std::map<std::string, const SafetensorsFile*> by_name;
  for (const auto& [tensor, name] : map) by_name.emplace(name, nullptr);
  if (by_name.size() > kMaxWeightFiles) {
    throw IoError(
        fmt::format("{}: {} files: expected at most {}", path_, by_name.size(), kMaxWeightFiles));
  }
  for (auto& [name, file] : by_name) {
    files_.push_back(std::make_unique<const SafetensorsFile>(folder_ + "/" + name));
    file = files_.back().get();
    for (const SafetensorsEntry& entry : file->entries()) {
      const auto found = map.find(entry.name);
      if (found == map.end() || found->second != name) {
        reject_tensor(
            file->path(), entry.name,
            fmt::format("is in {} by {}", found == map.end() ? "no file" : printable(found->second),
                        kIndexName));
      }
      tensors_.push_back({file, &entry});
    }
  }
  for (const auto& [tensor, name] : map) {
    const SafetensorsFile& file = *by_name.at(name);
    if (!file.find(tensor)) {
      reject_tensor(file.path(), tensor,
                    fmt::format("is missing, but in this file by {}", kIndexName));
    }
  }
}

StoredTensor WeightFiles::find(std::string_view name) const {
  const auto at = std::ranges::lower_bound(tensors_, name, {}, name_of_tensor);
  return at == tensors_.end() || name_of_tensor(*at) != name ? StoredTensor{} : *at;
}

StoredTensor WeightFiles::require(std::string_view name, std::span<const int64_t> shape) const {
  const StoredTensor tensor = find(name);
  if (!tensor) throw IoError(fmt::format("{}: tensor '{}' is missing", path_, name));
  if (!std::ranges::equal(tensor.entry->shape, shape)) tensor.file->require(name, shape);
  return tensor;
}

StoredTensor WeightFiles::require_scales(const StoredTensor& tensor) const {
  const SafetensorsEntry& matrix = *tensor.entry;
  if (matrix.dtype != DType::e4m3) return {};
  if (quantization_.method.empty() || matrix.shape.size() != 2) {
    reject_tensor(
        tensor.file->path(), matrix.name,
        fmt::format("e4m3 [{}]: expected f32, bf16 or f16, or a matrix and {} in {}",
                    fmt::join(matrix.shape, ", "), kQuantizationKey, folder_ + "/config.json"));
  }
  StoredTensor scales = find(matrix.name + "_scale_inv");
  if (!scales) scales = find(matrix.name + "_scale");
  if (!scales) {
    const bool has_blocks = quantization_.method == "fp8" && quantization_.block_rows > 0;
    throw IoError(fmt::format("{}: tensor '{}' is missing: expected {}", path_,
                              printable(matrix.name) + (has_blocks ? "_scale_inv" : "_scale"),
                              describe_scales(matrix, quantization_)));
  }
  check_scales(scales.file->path(), *scales.entry, matrix, quantization_);
  return scales;
}

void WeightFiles::verify() const {
  for (const auto& file : files_) file->verify();
}

std::string WeightFiles::header_hash() const {
  if (files_.size() == 1) return files_.front()->header_hash();
  std::string hashes;
  for (const auto& file : files_) hashes += file->header_hash();
  return content_hash(hashes);
}

std::string WeightFiles::identity() const {
  if (files_.size() == 1) return files_.front()->identity();
  std::vector<std::string> identities(files_.size());
  cpu::parallel_tasks(int64_t(files_.size()),
                      [&](int64_t i) { identities[size_t(i)] = files_[size_t(i)]->identity(); });
  return content_hash(fmt::format("{}", fmt::join(identities, "")));
}

}  // namespace tandem
