#include "engine/checkpoint/saving.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "core/host_copy.h"
#include "core/log.h"
#include "core/safetensors.h"
#include "engine/checkpoint/shared_tensors.h"
#include "engine/model/pretrained.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/parameter_slices.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kLayout = "layout";
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

/// Tensors of every parameter, named with a prefix.
struct Section {
  std::string prefix;
  Moment moment;
};
const Section kWeights{"", Moment::weights}, kFirst{"m.", Moment::first},
    kSecond{"v.", Moment::second}, kMaster{"w.", Moment::master};

/// Elements of a GPU's memory that are in host memory at a time.
constexpr int64_t kChunk = 1 << 22;

/// Calls `visit(piece, values)` for all pieces of tensors that this rank owns. If `is_written`, the
/// values are written to afterwards.
template <typename Visit>
void for_each_owned_slice(const TrainedStage& stage, Moment moment, bool is_written,
                          Visit&& visit) {
  const ParameterSlices slices(stage.model.parameter_list());
  for (const StateSlice& state : stage.optimizer.slices(moment)) {
    for (int64_t at = 0; at < state.values.elements(); at += kChunk) {
      const int64_t count = std::min(kChunk, state.values.elements() - at);
      const int64_t begin = state.begin + at;
      const HostCopy chunk(stage.model.exec(), state.values.narrow(0, at, count));
      slices.for_each({begin, count}, [&](const ParameterSlice& slice) {
        visit(slice, chunk.values().subspan(size_t(slice.flat - begin), size_t(slice.count)));
      });
      if (is_written) chunk.store();
    }
  }
}

/// Throws on every rank if a weight of any rank is not finite, before unusable files are written.
/// Collective.
void require_finite(const TrainedRanks& ranks, int64_t step) {
  std::string what;
  for (const TrainedStage& stage : ranks.stages) {
    for_each_owned_slice(stage, Moment::weights, false,
                         [&](const ParameterSlice& slice, std::span<const float> values) {
                           float sum = 0;  // 0 * x is 0 for every finite x
                           for (const float value : values) sum += 0 * value;
                           if (sum == 0 || !what.empty()) return;
                           const auto bad = std::ranges::find_if_not(
                               values, [](float x) { return std::isfinite(x); });
                           what = fmt::format("tensor '{}' has {} at element {}",
                                              ranks.parameter_list()[slice.parameter].name, *bad,
                                              slice.whole + (bad - values.begin()));
                         });
  }
  const auto all = ranks.world.exchange(std::as_bytes(std::span(what)), "finite weights");
  for (const auto& blob : all) {
    if (blob.empty()) continue;
    throw ConfigError(
        fmt::format("weights after step {}: {}: expected finite numbers (lower optimizer.lr)", step,
                    std::string_view(reinterpret_cast<const char*>(blob.data()), blob.size())));
  }
}

/// File written by all ranks.
struct Written {
  std::string hash;            ///< hash of its header
  std::optional<Share> share;  ///< this rank's share, if it sees the file
};

Written write_tensors(const TrainedRanks& ranks, const std::string& path,
                      const std::vector<Section>& sections,
                      const std::map<std::string, std::string>& metadata = {}) {
  const auto& list = ranks.parameter_list();
  SharedTensors::Specs specs;
  for (const Section& section : sections) {
    for (const Parameter& p : list) specs.push_back({section.prefix + p.name, DType::f32, p.shape});
  }
  SharedTensors file(ranks.world, path, specs, metadata);
  // Logged once per save.
  if (sections.front().moment == Moment::weights && ranks.world.rank() == 0 &&
      !file.ranks_without_path().empty()) {
    log_message(LogLevel::warn, fmt::format("{}: not seen by ranks {}, whose parts rank 0 writes",
                                            path, fmt::join(file.ranks_without_path(), ", ")));
  }
  std::string hash = file.fill([&](const SharedTensors::Write& write) {
    for (size_t s = 0; s < sections.size(); ++s) {
      for (const TrainedStage& stage : ranks.stages) {
        for_each_owned_slice(stage, sections[s].moment, false,
                             [&](const ParameterSlice& slice, std::span<const float> values) {
                               // Only TP rank 0 writes replicated tensors.
                               if (!list[slice.parameter].sharding.over_tp() && ranks.tp.rank() > 0)
                                 return;
                               write(s * list.size() + slice.parameter, slice.whole, values);
                             });
      }
    }
  });
  return {std::move(hash), file.share()};
}

void read_section(const TrainedRanks& ranks, const SafetensorsFile& file, const Section& section) {
  std::vector<const SafetensorsEntry*> entries;
  for (const Parameter& p : ranks.parameter_list())
    entries.push_back(&file.require(section.prefix + p.name, p.shape));
  for (const TrainedStage& stage : ranks.stages) {
    for_each_owned_slice(stage, section.moment, true,
                         [&](const ParameterSlice& slice, std::span<float> values) {
                           file.read_f32(*entries[slice.parameter], slice.whole, values);
                         });
  }
}

Written write_model(const TrainedRanks& ranks, const std::string& directory) {
  return write_tensors(ranks, directory + "/" + kModelFile, {kWeights}, {{"format", "pt"}});
}

std::vector<std::span<float>> residuals_of(const TrainedRanks& ranks) {
  std::vector<std::span<float>> residuals;
  for (const TrainedStage& stage : ranks.stages) {
    for (const auto residual : stage.optimizer.residuals()) residuals.push_back(residual);
  }
  return residuals;
}

std::string rank_name(int rank) {
  return fmt::format("rank.{}", rank);
}

/// Writes one array per rank of the world. Returns the header's hash; empty if there are no
/// residuals.
std::string write_residuals(const TrainedRanks& ranks, const std::string& path) {
  int64_t count = 0, total = 0;
  for (const auto residual : residuals_of(ranks)) count += int64_t(residual.size());
  SharedTensors::Specs specs;
  for (const auto& blob : ranks.world.exchange(std::as_bytes(std::span(&count, 1)), "residuals")) {
    int64_t remote = 0;
    std::memcpy(&remote, blob.data(), sizeof remote);
    specs.push_back({rank_name(int(specs.size())), DType::f32, {remote}});
    total += remote;
  }
  if (total == 0) return "";
  SharedTensors file(ranks.world, path, specs, {{kLayout, ranks.layout}});
  return file.fill([&](const SharedTensors::Write& write) {
    int64_t at = 0;
    for (const auto residual : residuals_of(ranks)) {
      write(size_t(ranks.world.rank()), at, residual);
      at += int64_t(residual.size());
    }
  });
}

/// Returns a note for the user, or an empty string.
std::string load_residuals(const TrainedRanks& ranks, const std::string& path) {
  size_t count = 0;
  for (const auto residual : residuals_of(ranks)) count += residual.size();
  if (!path_exists(path)) {
    if (count == 0) return "";
    return "the checkpoint holds no residuals of error feedback: they start at zero";
  }
  if (count == 0) return "the checkpoint's residuals of error feedback are not used";
  const SafetensorsFile file(path);
  const auto layout = file.metadata().find(kLayout);
  if (layout == file.metadata().end() || layout->second != ranks.layout) {
    return fmt::format(
        "the checkpoint's residuals of error feedback are of {}, this run is {}: they start at "
        "zero",
        layout == file.metadata().end() ? "an unknown layout" : layout->second, ranks.layout);
  }
  const int64_t shape[] = {int64_t(count)};
  const SafetensorsEntry& entry = file.require(rank_name(ranks.world.rank()), shape);
  int64_t at = 0;
  for (const auto residual : residuals_of(ranks)) {
    file.read_f32(entry, at, residual);
    at += int64_t(residual.size());
  }
  return "";
}

void load_tensors(const TrainedRanks& ranks, const std::string& path) {
  const SafetensorsFile weights(path + "/" + kModelFile);
  const SafetensorsFile moments(path + "/" + kOptimizerFile);
  for (const auto& [model, optimizer] : ranks.stages) {
    load_parameters(weights, model.parameter_list(), model.exec(), model.parameter_staging());
  }
  read_section(ranks, moments, kFirst);
  read_section(ranks, moments, kSecond);
  const bool has_masters = moments.find(kMaster.prefix + ranks.parameter_list().front().name);
  if (has_masters && ranks.has_masters()) return read_section(ranks, moments, kMaster);
  for (const auto& [model, optimizer] : ranks.stages) {
    if (has_masters) {
      // Weights are sent uncompressed in this run: it resumes from the master weights.
      std::vector<Parameter> masters = model.parameter_list();
      for (Parameter& p : masters) p.name = kMaster.prefix + p.name;
      load_parameters(moments, masters, model.exec(), model.parameter_staging());
    }
    optimizer.adopt_weights(model.parameter_staging());
  }
}

}  // namespace

uint64_t TrainedRanks::bytes() const {
  uint64_t elements = 0;
  for (const Parameter& p : parameter_list()) {
    elements +=
        uint64_t(std::accumulate(p.shape.begin(), p.shape.end(), int64_t{1}, std::multiplies<>()));
  }
  return 3 * sizeof(float) * elements;
}

const std::vector<Parameter>& TrainedRanks::parameter_list() const {
  return stages.front().model.parameter_list();
}

bool TrainedRanks::has_masters() const {
  return std::ranges::any_of(stages,
                             [](const TrainedStage& s) { return s.optimizer.has_masters(); });
}

void save_checkpoint(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                     const ModelConfig& model, CheckpointKeeper* keeper) {
  require_finite(ranks, state.step);
  std::unique_ptr<CheckpointWriter> checkpoint;  // on rank 0
  on_rank_zero(ranks.world, "opening a checkpoint", [&] {
    checkpoint = std::make_unique<CheckpointWriter>(out, state.step);
    return std::string();
  });
  const std::string folder = CheckpointWriter::temporary_folder(out, state.step);
  std::map<std::string, std::string> hashes;
  const std::string residuals_hash = write_residuals(ranks, folder + "/" + kResidualsFile);
  if (!residuals_hash.empty()) hashes[kResidualsFile] = residuals_hash;
  const Written model_file = write_model(ranks, folder);
  hashes[kModelFile] = model_file.hash;
  std::vector<Section> sections{kFirst, kSecond};
  if (ranks.has_masters()) sections.push_back(kMaster);
  hashes[kOptimizerFile] = write_tensors(ranks, folder + "/" + kOptimizerFile, sections).hash;
  on_rank_zero(ranks.world, "completing a checkpoint", [&] {
    checkpoint->commit(state, model, hashes);
    return std::string();
  });
  const std::string path = checkpoint_path(out, state.step);
  const auto problems = on_every_rank(ranks.world, "reading a checkpoint back", ranks.bytes(), [&] {
    try {
      if (model_file.share) verify_checkpoint(path, *model_file.share);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  });
  const auto problem =
      std::ranges::find_if(problems, [](const std::string& text) { return !text.empty(); });
  on_rank_zero(
      ranks.world, "removing old checkpoints",
      [&] {
        keeper->saved(path, problem == problems.end() ? "" : *problem);
        return std::string();
      },
      ranks.bytes());
}

void save_final(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                const ModelConfig& model) {
  require_finite(ranks, state.step);
  std::unique_ptr<DirectoryWriter> directory;  // on rank 0
  on_rank_zero(ranks.world, "opening the final model", [&] {
    directory = std::make_unique<DirectoryWriter>(out, "final");
    return std::string();
  });
  const std::string folder = DirectoryWriter::temporary_folder(out, "final");
  const std::string hash = write_model(ranks, folder).hash;
  on_rank_zero(ranks.world, "completing the final model", [&] {
    write_state(folder, state, model, {{kModelFile, hash}});
    directory->commit();
    return std::string();
  });
}

std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path) {
  const auto notes = on_every_rank(ranks.world, "loading a checkpoint", ranks.bytes(), [&] {
    load_tensors(ranks, path);
    return load_residuals(ranks, path + "/" + kResidualsFile);
  });
  for (const TrainedStage& stage : ranks.stages) stage.model.parameters_changed();
  return notes[size_t(ranks.world.rank())];
}

}  // namespace tandem
