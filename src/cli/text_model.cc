#include "cli/text_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>

#include "comm/exec.h"
#include "core/system/console.h"
#include "core/system/machine.h"
#include "core/system/process/clock.h"
#include "engine/infer/rank_model.h"
#include "engine/model/pretrained.h"
#include "engine/tokenizer/tokenizer.h"
#include "gemm/gemm.h"
#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/world.h"

namespace tandem::cli {
namespace {

constexpr int64_t kCpuPromptRows = 64, kGpuPromptRows = 2048;

/// Reason that only CPU ranks write the texts, or empty.
std::string describe_cpu_only(const TextNeeds& needs, int ranks) {
  if (needs.is_iso) return "--prefill iso";
  if (!needs.batch_invariant) return "";
  if (ranks > 1) return fmt::format("--batch-invariant with {} ranks", ranks);
  if (needs.texts <= kMaxFewRows) return "";
  return fmt::format("--batch-invariant with {} texts at once", needs.texts);
}

}  // namespace

void add_model_option(CLI::App& command, std::string& directory) {
  command
      .add_option("dir", directory,
                  "Folder that tandem train wrote (its --out, final/ or a checkpoint), or a "
                  "Hugging Face folder")
      ->required();
}

CLI::Option* add_tp_option(CLI::App& command, int& ranks) {
  return command.add_option("--tp,--ranks", ranks, "Tensor-parallel ranks (threads)")
      ->capture_default_str();
}

void add_weights_option(CLI::App& command, std::string& weights) {
  command
      .add_option("--weights", weights,
                  fmt::format("Codes of the weights of matrix products: int8, {} of a row with one "
                              "scale, or e4m3, {} (none: weights as --dtype)",
                              group_of(WeightFormat::int8), group_of(WeightFormat::e4m3)))
      ->capture_default_str()
      ->check(CLI::IsMember(weight_format_names()));
}

void add_compute_options(CLI::App& command, std::string& dtype, std::string& weights,
                         DeviceOptions& devices, std::string& codec) {
  command
      .add_option("--dtype", dtype,
                  "Data type of matrix products (default: f32 on CPUs, bf16 on GPUs)")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_weights_option(command, weights);
  add_device_options(command, devices);
  command
      .add_option("--codec", codec,
                  "Wire format of sums over ranks (int8), or one per site: attention, mlp, "
                  "experts, embeddings (mlp=int4:g32,embeddings=int8)")
      ->capture_default_str();
}

std::string text_dtype(const std::string& dtype, const DeviceOptions& devices) {
  if (!dtype.empty()) return dtype;
  return devices.on_gpus() ? "bf16" : "f32";
}

CLI::Option* add_prompt_rows_option(CLI::App& command, int64_t& rows) {
  return command
      .add_option("--prompt-rows", rows,
                  fmt::format("Rows of a step for new prompts (default: {} on CPUs, {} on GPUs)",
                              kCpuPromptRows, kGpuPromptRows))
      ->check(CLI::Range(1, 1 << 16));
}

CLI::Option* add_batch_invariant_flag(CLI::App& command, bool& flag) {
  return command.add_flag("--batch-invariant", flag,
                          "Write the same tokens, bit for bit, whatever else is written: always so "
                          "on CPUs, at some cost of speed on one GPU");
}

int64_t prompt_rows(int64_t rows, const DeviceOptions& devices) {
  if (rows > 0) return rows;
  return devices.on_gpus() ? kGpuPromptRows : kCpuPromptRows;
}

StoredModel open_text_model(const std::string& directory, DeviceOptions& devices,
                            WorldOptions& world, std::string& dtype, const TextNeeds& needs) {
  StoredModel stored = open_model(directory, note);
  if (!stored.tokenizer && stored.config.vocab <= kBos) {
    throw ConfigError(fmt::format("{}/config.json: vocab_size = {}: expected at least {} (bytes)",
                                  stored.directory, stored.config.vocab, kBos + 1));
  }
  const int ranks = count_ranks(world);
  const DType gpu_dtype = parse_dtype(dtype.empty() ? "bf16" : dtype);
  const std::optional<WeightFormat> format = parse_weight_format(needs.weights);
  const auto check_gpus = [&] {
    check_gpu_generation(stored.config, ranks, gpu_dtype, format);
    return gpu_weight_bytes(stored.config, ranks, gpu_dtype, format);
  };
  const std::string cpu_only = describe_cpu_only(needs, ranks);
  set_devices(devices, world, {cpu_only, check_gpus});
  dtype = text_dtype(dtype, devices);
  if (devices.on_gpus()) {
    if (!cpu_only.empty()) throw Unsupported(cpu_only + " on GPUs: expected CPU ranks");
    check_gpus();
  }
  if (format) check_coded_weights(stored.config, launched() ? 1 : ranks, *format);
  if (!launched()) stored.config.check(ranks);
  return stored;
}

std::string describe(const LoadedWeights& loaded) {
  return fmt::format("Loaded {:.3g} GB of weights in {:.3g} s: {:.3g} GB/s", loaded.bytes * 1e-9,
                     loaded.seconds, loaded.bytes * 1e-9 / loaded.seconds);
}

LoadedWeights load_weights(Communicator& tp, const StoredModel& stored,
                           const std::function<void(const SetParameter&)>& set_weights) {
  const auto begin = std::chrono::steady_clock::now();
  const Exec exec = make_exec(tp);
  ParameterReader reader(stored.weights, exec);
  set_weights([&](const Parameter& p, const WeightViews& to) { reader.read(p, to); });
  wait(exec);
  const LoadedWeights local{double(reader.bytes()), seconds_since(begin)};
  LoadedWeights all{};
  for (const auto& blob : tp.exchange(std::as_bytes(std::span(&local, 1)), "load weights")) {
    LoadedWeights rank{};
    std::memcpy(&rank, blob.data(), sizeof rank);
    all = {all.bytes + rank.bytes, std::max(all.seconds, rank.seconds)};
  }
  return all;
}

void check_defaults(const StoredModel& stored, const SamplingOptions& sampling,
                    const LogitsProcessors& rules) {
  try {
    check(sampling);
    check(rules, stored.config.vocab);
  } catch (const InvalidArgument& error) {
    throw ConfigError(
        fmt::format("{}/generation_config.json: {}", stored.side.folder, error.what()));
  }
}

}  // namespace tandem::cli
