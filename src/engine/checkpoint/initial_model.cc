#include "engine/checkpoint/initial_model.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/system/files.h"
#include "engine/checkpoint/run/same_run.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr double kLr = 2e-5, kMinLr = 2e-6;
constexpr int64_t kWarmupShare = 20, kMaxWarmup = 100;

/// Whether the file is the tokenizer of a folder.
bool is_tokenizer_of(const std::string& file, const std::string& folder) {
  std::error_code error;
  return fs::equivalent(file, folder + "/" + find_tokenizer(folder), error) && !error;
}

/// `parse`: the job, over settings that it is given.
template <typename Parse>
TrainConfig load_initial(const Parse& parse, const std::string& init) {
  const std::string folder = find_model(init, [](const std::string&) {});
  const std::string shape = folder + "/config.json";
  TrainConfig base;
  base.model = model_config_from_json(read_small_file(shape), shape);
  base.train.init = fs::absolute(init).lexically_normal().string();
  base.optimizer.lr = kLr;
  base.optimizer.min_lr = kMinLr;
  base.optimizer.warmup = -1;
  const std::string vocabulary = fs::absolute(side_folder(folder)).lexically_normal().string();
  if (!find_tokenizer(vocabulary).empty()) base.data.tokenizer = vocabulary;
  TrainConfig config = parse(base);
  config.train.init = base.train.init;
  require_same_model(init, base.model, config.model);
  if (config.optimizer.warmup < 0) {
    config.optimizer.warmup = std::clamp<int64_t>(config.train.steps / kWarmupShare, 1, kMaxWarmup);
  }
  if (is_tokenizer_of(config.data.tokenizer, vocabulary)) config.data.tokenizer = vocabulary;
  return config;
}

/// Settings of the run in `out`; the default ones if there is none, or one of another version.
TrainConfig read_run(const std::string& out) {
  const std::string file = out + "/config.toml";
  if (out.empty() || !path_exists(file)) return {};
  try {
    return load_config(file, {});
  } catch (const ConfigError&) {
    return {};
  }
}

}  // namespace

TrainConfig load_run_config(const std::string& file, std::span<const std::string> overrides,
                            std::string init, const std::string& resumed,
                            std::vector<std::string>* notes) {
  TrainConfig base;
  if (const TrainConfig run = read_run(resumed); !run.train.init.empty()) {
    base.model = run.model;
    if (!find_tokenizer(resumed).empty()) base.data.tokenizer = fs::absolute(resumed).string();
    base.train.init = run.train.init;
    base.optimizer.lr = run.optimizer.lr;
    base.optimizer.min_lr = run.optimizer.min_lr;
    base.optimizer.warmup = run.optimizer.warmup;
  }
  const std::string text = read_file(file, Source::any);  // once: it may be a pipe
  const auto parse = [&](TrainConfig given) {
    return parse_config(text, file, overrides, notes, std::move(given));
  };
  if (!resumed.empty() && path_exists(resumed + "/config.toml")) return parse(base);
  if (init.empty()) init = parse_config(text, file, overrides).train.init;
  if (!init.empty()) return load_initial(parse, init);
  return parse(base);
}

TrainConfig load_initial_config(const std::string& init,
                                const std::function<void(TrainConfig&)>& set_defaults,
                                std::span<const std::string> overrides,
                                std::vector<std::string>* notes) {
  const auto parse = [&](TrainConfig given) {
    set_defaults(given);
    return parse_config("", "", overrides, notes, std::move(given));
  };
  return load_initial(parse, init);
}

}  // namespace tandem
