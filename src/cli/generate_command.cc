#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "core/machine.h"
#include "infer/generator.h"
#include "kernels/gemm.h"
#include "model/pretrained.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct GenerateArguments {
  std::string directory, prompt, dtype = "f32";
  int ranks = 1;
  int64_t max_tokens = 256;
  SamplingOptions sampling;
};

std::vector<int32_t> tokens_of(const std::string& text) {
  std::vector<int32_t> tokens{kBos};
  for (const char c : text) tokens.push_back(int32_t(uint8_t(c)));
  return tokens;
}

void generate(Communicator& tp, const GenerateArguments& arguments, const SafetensorsFile& weights,
              const ModelConfig& config) {
  GeneratorOptions options;
  options.dtype = parse_dtype(arguments.dtype);
  options.overlap.strategy = Strategy::serial;  // few rows: nothing to hide under
  Generator generator(tp, config, options);
  load_parameters(weights, generator.parameter_list(), generator.parameters());
  generator.parameters_changed();

  const bool prints = tp.rank() == 0;
  if (prints) std::fwrite(arguments.prompt.data(), 1, arguments.prompt.size(), stdout);
  const auto prompt = tokens_of(arguments.prompt);
  generator.generate(prompt, arguments.max_tokens, arguments.sampling, [&](int32_t token) {
    if (token >= kBos) return false;  // the text is over
    if (prints) {
      std::fputc(token, stdout);
      std::fflush(stdout);
    }
    return true;
  });
  if (prints) {
    std::fputc('\n', stdout);
    std::fflush(stdout);
  }
}

void run(const GenerateArguments& arguments) {
  check(arguments.sampling);
  if (arguments.max_tokens < 0) {
    throw InvalidArgument(fmt::format("--max-tokens {}: expected 0 or more", arguments.max_tokens));
  }
  const std::string directory = model_directory(arguments.directory);
  const ModelConfig config = load_model_config(directory);
  if (config.vocab != kBos + 1) {
    throw ConfigError(fmt::format("{}/config.json: vocab_size = {}: expected {} (bytes)", directory,
                                  config.vocab, kBos + 1));
  }
  const SafetensorsFile weights(directory + "/model.safetensors");
  weights.verify();
  const std::string identity = model_identity(config, weights);
  WorldOptions world;
  world.ranks = arguments.ranks;
  if (!launched_by_mpi()) config.check(arguments.ranks);
  run_world(world, [&](Communicator& tp) {
    tp.require_same("the model", identity);
    const auto& sampling = arguments.sampling;
    tp.require_same("options",
                    fmt::format("--temperature {} --top-p {} --seed {} --max-tokens {} --dtype {} "
                                "--prompt {}",
                                sampling.temperature, sampling.top_p, sampling.seed,
                                arguments.max_tokens, arguments.dtype, arguments.prompt));
    set_kernel_threads(threads_per_rank(tp.size()));
    generate(tp, arguments, weights, config);
  });
}

}  // namespace

void add_generate(CLI::App& app) {
  auto arguments = std::make_shared<GenerateArguments>();
  auto* command = app.add_subcommand("generate", "Continue a text with a trained model");
  command
      ->add_option("dir", arguments->directory,
                   "What train left: its --out, final/ or a checkpoint")
      ->required();
  command->add_option("--prompt", arguments->prompt, "Text to continue");
  command->add_option("--tp,--ranks", arguments->ranks, "Tensor-parallel ranks (threads)")
      ->capture_default_str();
  command
      ->add_option("--temperature", arguments->sampling.temperature, "0: always the likeliest byte")
      ->capture_default_str();
  command
      ->add_option("--top-p", arguments->sampling.top_p,
                   "Only the likeliest bytes that make up this share")
      ->capture_default_str();
  command->add_option("--seed", arguments->sampling.seed, "Same seed, same text")
      ->capture_default_str();
  command->add_option("--max-tokens", arguments->max_tokens, "Bytes to write at most")
      ->capture_default_str();
  command->add_option("--dtype", arguments->dtype, "Of matrix products")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->footer(
      "\nExamples:\n"
      "  tandem generate out/tiny --prompt '#include <'\n"
      "  tandem generate out/tiny --prompt 'int main' --temperature 0 --max-tokens 80 --tp 2");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
