#include "engine/checkpoint/saving.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "core/formats/safetensors.h"
#include "core/host_copy.h"
#include "core/system/files.h"
#include "core/system/log.h"
#include "engine/checkpoint/fuse_experts.h"
#include "engine/checkpoint/sections.h"
#include "engine/checkpoint/shared_tensors.h"
#include "engine/model/fused_tensors.h"
#include "engine/model/pretrained.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Calls `visit(slice, values)` for all slices of tensors that this rank owns.
template <typename Visit>
void for_each_slice(const TrainedRanks& ranks, const OwnedState& owned, Moment moment,
                    Visit&& visit) {
  for (size_t stage = 0; stage < ranks.stages.size(); ++stage) {
    const ParameterSlices slices(ranks.stages[stage].model.parameter_list());
    owned.for_each(stage, moment, [&](int64_t begin, const Tensor& values) {
      slices.for_each({begin, values.elements()}, [&](const ParameterSlice& slice) {
        visit(slice, values.narrow(0, slice.flat - begin, slice.count));
      });
    });
  }
}

using FindValue = std::optional<size_t>(const Tensor& values);

/// "tensor 'NAME' has VALUE at element N" for a weight that `find` finds on the first rank that has
/// one; empty: there is none. Collective.
std::string find_weight(const TrainedRanks& ranks, const OwnedState& owned, FindValue* find) {
  std::string what;
  for_each_slice(ranks, owned, Moment::weights,
                 [&](const ParameterSlice& slice, const Tensor& values) {
                   const auto found = what.empty() ? find(values) : std::nullopt;
                   if (!found) return;
                   what = fmt::format("tensor '{}' has {} at element {}",
                                      ranks.parameter_list()[slice.parameter].name,
                                      host_values(values)[*found], slice.whole + int64_t(*found));
                 });
  for (const auto& blob : ranks.world.exchange(std::as_bytes(std::span(what)), "weights")) {
    if (!blob.empty()) return {reinterpret_cast<const char*>(blob.data()), blob.size()};
  }
  return "";
}

/// Throws on every rank if a weight of any rank is not finite, before unusable files are written.
/// Collective.
void require_finite(const TrainedRanks& ranks, const OwnedState& owned, int64_t step) {
  const std::string what = find_weight(ranks, owned, first_not_finite);
  if (what.empty()) return;
  throw ConfigError(fmt::format(
      "weights after step {}: {}: expected finite numbers (lower optimizer.lr)", step, what));
}

/// Index of the first value whose square is not finite.
std::optional<size_t> first_overflow(const Tensor& tensor) {
  const std::span values = host_values(tensor);
  const float max = std::sqrt(std::numeric_limits<float>::max());
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  if (largest <= max) return std::nullopt;
  const auto found = std::ranges::find_if(values, [&](float x) { return std::abs(x) > max; });
  return size_t(found - values.begin());
}

/// File written by all ranks, not synced.
struct Written {
  std::string name, hash;  ///< hash of its header
  std::unique_ptr<SharedTensors> file;
};

/// Tensor of a file that has a parameter, and the position of its first element in it.
struct StoredPosition {
  size_t tensor;
  int64_t begin;
};

std::vector<StoredPosition> stored_positions(const std::vector<StoredParameters>& tensors,
                                             const std::vector<Parameter>& list) {
  std::vector<StoredPosition> positions(list.size());
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    for (const StoredParameter& slice : tensors[tensor].slices) {
      positions[slice.parameter] = {tensor, slice.first};
    }
  }
  return positions;
}

/// `model`: its parameters have the names that it has on disk, fused ones included; not strided
/// experts.
Written write_tensors(const TrainedRanks& ranks, const OwnedState& owned,
                      const std::string& directory, const char* name,
                      const std::vector<Section>& sections, const ModelConfig& model = {},
                      DType dtype = DType::f32,
                      const std::map<std::string, std::string>& metadata = {}) {
  const auto& list = ranks.parameter_list();
  const std::vector<StoredParameters> tensors = stored_parameters(model, list);
  const std::vector<StoredPosition> positions = stored_positions(tensors, list);
  SharedTensors::Specs specs;
  for (const Section& section : sections) {
    for (const auto& each : tensors)
      specs.push_back({section.prefix + each.name, dtype, each.shape});
  }
  const std::string path = directory + "/" + name;
  auto file = std::make_unique<SharedTensors>(ranks.world, path, specs, metadata);
  // Logged once per save.
  if (path.ends_with(kModelFile) && ranks.world.rank() == 0 &&
      !file->ranks_without_path().empty()) {
    log_message(LogLevel::warn, fmt::format("{}: not seen by ranks {}, whose parts rank 0 writes",
                                            path, fmt::join(file->ranks_without_path(), ", ")));
  }
  std::string hash = file->fill([&](const SharedTensors::Write& write) {
    for (size_t s = 0; s < sections.size(); ++s) {
      if (sections[s].learner != ranks.learner) continue;
      for_each_slice(ranks, owned, sections[s].moment,
                     [&](const ParameterSlice& slice, const Tensor& values) {
                       // Only TP rank 0 writes replicated tensors.
                       if (!list[slice.parameter].sharding.over_tp() && ranks.tp.rank() > 0) return;
                       const auto& [tensor, begin] = positions[slice.parameter];
                       write(s * tensors.size() + tensor, begin + slice.whole, values);
                     });
    }
  });
  return {name, std::move(hash), std::move(file)};
}

Written write_model(const TrainedRanks& ranks, const OwnedState& owned,
                    const std::string& directory, const ModelConfig& model = {},
                    DType dtype = DType::f32) {
  return write_tensors(ranks, owned, directory, kModelFile,
                       {ranks.learners > 1 ? kAnchor : kWeights}, model, dtype, {{"format", "pt"}});
}

/// Sections of the optimizer's file.
std::vector<Section> optimizer_sections(const TrainedRanks& ranks) {
  std::vector<Section> sections;
  if (ranks.learners == 1) {
    sections = {kFirst, kSecond};
    if (ranks.has_masters()) sections.push_back(kMaster);
    return sections;
  }
  if (ranks.has_outer(Moment::outer_momentum)) sections.push_back(kOuterMomentum);
  for (int learner = 0; learner < ranks.learners; ++learner) {
    const auto all = learner_sections(learner, ranks.outer);
    sections.insert(sections.end(), all.begin(), all.end());
  }
  return sections;
}

/// Writes one array per rank of the world, if there are residuals.
std::optional<Written> write_residuals(const TrainedRanks& ranks, const OwnedState& owned,
                                       const std::string& directory) {
  int64_t count = 0, total = 0;
  const auto residuals = owned.residuals();
  for (const Tensor& residual : residuals) count += residual.elements();
  SharedTensors::Specs specs;
  for (const auto& blob : ranks.world.exchange(std::as_bytes(std::span(&count, 1)), "residuals")) {
    int64_t remote = 0;
    std::memcpy(&remote, blob.data(), sizeof remote);
    specs.push_back({rank_name(int(specs.size())), DType::f32, {remote}});
    total += remote;
  }
  if (total == 0) return std::nullopt;
  auto file =
      std::make_unique<SharedTensors>(ranks.world, directory + "/" + kResidualsFile, specs,
                                      std::map<std::string, std::string>{{kLayout, ranks.layout}});
  std::string hash = file->fill([&](const SharedTensors::Write& write) {
    int64_t at = 0;
    for (const Tensor& residual : residuals) {
      write(size_t(ranks.world.rank()), at, residual);
      at += residual.elements();
    }
  });
  return Written{kResidualsFile, std::move(hash), std::move(file)};
}

/// Problem that a rank finds in its share of the files, or empty. From the page cache, while the
/// disk still writes them. Collective.
std::string verify_share(const TrainedRanks& ranks, const std::string& folder,
                         const std::optional<Share>& share) {
  const auto problems = on_every_rank(ranks.world, "reading a checkpoint back", ranks.bytes(), [&] {
    try {
      if (share) verify_checkpoint(folder, *share);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  });
  const auto found =
      std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
  return found == problems.end() ? "" : *found;
}

/// Tokens of the tokenizer in `out` by their keys in config.json, and those that its side files end
/// a text with.
nlohmann::ordered_json special_tokens(const std::string& out) {
  nlohmann::ordered_json ids;
  if (find_tokenizer(out).empty()) return ids;
  const auto tokenizer = open_tokenizer(out);
  for (const char* role : {"bos_token", "eos_token", "pad_token"}) {
    const auto name = tokenizer->special_tokens().find(role);
    const int32_t id =
        name == tokenizer->special_tokens().end() ? -1 : tokenizer->find(name->second);
    if (id >= 0) ids[std::string(role) + "_id"] = id;
  }
  const auto generation = read_side_files(out).generation;
  for (const char* key : kTokenIds) {
    if (!generation.is_object() || !generation.contains(key)) continue;
    if (!generation[key].is_null()) ids[key] = generation[key];
  }
  return ids;
}

}  // namespace

std::string describe_overflow(const TrainedRanks& ranks, const OwnedState& owned) {
  const std::string what = find_weight(ranks, owned, first_overflow);
  return what.empty() ? "" : what + ", whose square overflows: norms make 0 of it";
}

std::string save_checkpoint(const TrainedRanks& ranks, const OwnedState& owned,
                            const std::string& out, const TrainState& state,
                            const ModelConfig& model, CheckpointKeeper* keeper) {
  require_finite(ranks, owned, state.step);
  const std::string overflow = describe_overflow(ranks, owned);
  std::unique_ptr<CheckpointWriter> checkpoint;  // on rank 0
  on_rank_zero(ranks.world, "opening a checkpoint", [&] {
    keeper->note_overflow(state.step, overflow);
    if (const auto free = free_bytes(out + "/checkpoints")) keeper->make_room(ranks.bytes(), *free);
    checkpoint = std::make_unique<CheckpointWriter>(out, state.step);
    return std::string();
  });
  const std::string folder = CheckpointWriter::temporary_folder(out, state.step);
  std::vector<Written> files;
  if (auto residuals = write_residuals(ranks, owned, folder)) {
    files.push_back(std::move(*residuals));
  }
  files.push_back(write_model(ranks, owned, folder));
  files.push_back(write_tensors(ranks, owned, folder, kOptimizerFile, optimizer_sections(ranks)));
  on_rank_zero(ranks.world, "completing a checkpoint", [&] {
    std::map<std::string, std::string> hashes;
    for (const Written& each : files) hashes[each.name] = each.hash;
    checkpoint->complete(state, model, hashes);
    return std::string();
  });
  std::string problem = verify_share(ranks, folder, files.back().file->share());
  if (problem.empty()) {
    for (const Written& each : files) each.file->sync();
  }
  on_rank_zero(
      ranks.world, "removing old checkpoints",
      [&] {
        if (problem.empty()) checkpoint->commit();
        keeper->saved(checkpoint_path(out, state.step), problem);
        return std::string();
      },
      ranks.bytes());
  return problem;
}

void save_final(const TrainedRanks& ranks, const OwnedState& owned, const std::string& out,
                const TrainState& state, const ModelConfig& model, DType dtype) {
  require_finite(ranks, owned, state.step);
  std::unique_ptr<DirectoryWriter> directory;  // on rank 0
  on_rank_zero(ranks.world, "opening the final model", [&] {
    directory = std::make_unique<DirectoryWriter>(out, "final");
    return std::string();
  });
  const std::string folder = DirectoryWriter::temporary_folder(out, "final");
  ModelConfig separate = model;
  separate.fused_experts = false;
  Written weights = write_model(ranks, owned, folder, separate, dtype);
  weights.file->sync();
  if (model.fused_experts) {
    on_rank_zero(
        ranks.world, "fusing experts of the final model",
        [&] {
          weights.hash = fuse_experts(folder + "/" + kModelFile, model);
          return std::string();
        },
        ranks.bytes());
  }
  on_rank_zero(ranks.world, "completing the final model", [&] {
    write_state(folder, state, model, {{kModelFile, weights.hash}}, dtype, special_tokens(out));
    if (!find_tokenizer(out).empty()) copy_tokenizer(out, folder);
    directory->commit();
    return std::string();
  });
}

}  // namespace tandem
