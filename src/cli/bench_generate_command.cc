#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/bench_receipt.h"
#include "bench/engine/bench_generate.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "cli/text_model.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "engine/infer/rank_model.h"
#include "engine/model/published_models.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct GenerateBenchArguments {
  GenerateBench request;
  DeviceOptions devices;
  ResultOutput output;
};

const std::string& weight_dtype(const GenerateBench& q) {
  return q.format() ? q.weights : q.dtype;
}

nlohmann::ordered_json json_of(const GenerateBench& q, const GenerateBenchResult& r,
                               const Communicator& comm) {
  nlohmann::ordered_json us, spread;
  const auto add = [&](const char* name, const BenchTimes& times) {
    us[name] = round_to(times.median_us, 10);
    spread[name] = {round_to(times.min_us, 10), round_to(times.max_us, 10)};
  };
  add("first_token", r.first_token);
  add("next_token", r.next_token);
  add("token_step", r.token_step);
  nlohmann::ordered_json json = {{"op", "generate"},
                                 {"model", q.model},
                                 {"layers", q.layers},
                                 {"vocab", q.vocab},
                                 {"batch", q.batch},
                                 {"prompt", q.prompt},
                                 {"new", q.max_tokens},
                                 {"min_prompt", q.min_prompt > 0 ? q.min_prompt : q.prompt},
                                 {"prompt_rows", q.prompt_rows},
                                 {"mixed_rows", q.mixed_rows},
                                 {"batch_invariant", q.batch_invariant},
                                 {"tp", q.tp},
                                 {"transport", comm.transport()},
                                 {"temperature", q.sampling.temperature},
                                 {"top_k", q.sampling.top_k},
                                 {"top_p", q.sampling.top_p},
                                 {"dtype", q.dtype},
                                 {"weights", weight_dtype(q)},
                                 {"time_us", us},
                                 {"spread_us", spread},
                                 {"p99_us",
                                  {{"first_token", round_to(r.first_token_p99_us, 10)},
                                   {"next_token", round_to(r.next_token_p99_us, 10)}}},
                                 {"tokens_per_s", round_to(r.tokens_per_s, 100)},
                                 {"step_bytes", int64_t(r.step_bytes)}};
  if (r.ahead > 0) json["ahead"] = round_to(r.ahead, 1000);
  if (comm.size() > 1 && !comm.on_gpu()) json["logit_bytes"] = round_to(r.logit_bytes, 10);
  if (r.token_step.median_us > 0) json["step_gb_per_s"] = round_to(r.bytes_per_s() * 1e-9, 1000);
  if (r.read_bytes_per_s > 0) json["read_gb_per_s"] = round_to(r.read_bytes_per_s * 1e-9, 1000);
  if (q.rate > 0) {
    json["rate"] = q.rate;
    json["requests"] = q.requests;
  } else {
    json["repeats"] = q.repeats;
  }
  json["preempted"] = r.preempted;
  json["load_s"] = r.load_s;
  json["weight_bytes"] = r.weight_bytes;
  json["memory_bytes"] = r.memory_bytes;
  json["same_separately"] = r.is_same_separately;
  json["receipt"] = to_json(r.receipts);
  json.update(origin_json(comm));
  return json;
}

std::string text_of(const GenerateBench& q, const GenerateBenchResult& r) {
  const auto row = [](const char* name, const BenchTimes& times, double p99) {
    return fmt::format("  {:<12} {:>10.3f} ms{}\n", name, times.median_us * 1e-3,
                       p99 > 0 ? fmt::format(", p99 {:.3f}", p99 * 1e-3) : "");
  };
  std::string text =
      fmt::format("{}, layers: {}, tp {}, {}{}: {}, prompts of {} tokens, {} new\n", q.model,
                  q.layers, q.tp, q.dtype, q.format() ? ", weights in " + q.weights : "",
                  q.rate > 0 ? fmt::format("{} requests, {} a second, at most {} at "
                                           "once",
                                           q.requests, q.rate, q.batch)
                             : fmt::format("{} at once", q.batch),
                  q.prompt, q.max_tokens);
  text += row("first token", r.first_token, r.first_token_p99_us);
  text += row("next token", r.next_token, r.next_token_p99_us);
  if (r.token_step.median_us > 0) {
    text += row("token step", r.token_step, 0);
    text += fmt::format("  {:.2f} GB of weights, keys and values a step: {:.2f} GB/s",
                        r.step_bytes * 1e-9, r.bytes_per_s() * 1e-9);
    text += r.read_bytes_per_s >= r.bytes_per_s()  // else it was measured on a busy machine
                ? fmt::format(", {:.1f} % of {:.2f} GB/s\n",
                              100 * r.bytes_per_s() / r.read_bytes_per_s, r.read_bytes_per_s * 1e-9)
                : "\n";
  }
  if (r.logit_bytes > 0)
    text += fmt::format("  {:.0f} bytes sent a token that is sampled\n", r.logit_bytes);
  text += receipt_lines(r.receipts, 100);
  return text + fmt::format("  {:.1f} tokens/s; a request {} its tokens with no other\n",
                            r.tokens_per_s, r.is_same_separately ? "has" : "DOES NOT HAVE");
}

void bench(const GenerateBenchArguments& arguments, Communicator& comm) {
  const GenerateBenchResult result = run_generate_bench(comm, arguments.request);
  if (comm.rank() == 0) {
    arguments.output.write(text_of(arguments.request, result),
                           json_of(arguments.request, result, comm));
  }
  if (result.is_same_separately) return;
  throw Error("bench generate: a request has other tokens with no other request");
}

void run(GenerateBenchArguments arguments) {
  GenerateBench& q = arguments.request;
  WorldOptions world;
  world.ranks = q.tp;
  const auto check_gpus = [&] {
    const ModelConfig config = generate_bench_config(q, true);
    return gpu_weight_bytes(config, q.tp, parse_dtype(q.dtype), q.format());
  };
  set_devices(arguments.devices, world, {.check_gpus = check_gpus});
  q.prompt_rows = prompt_rows(q.prompt_rows, arguments.devices);
  const ModelConfig config = generate_bench_config(q, arguments.devices.on_gpus());
  q.layers = config.layers;
  q.vocab = config.vocab;
  arguments.output.check();
  run_ranks(arguments.devices, world, [&](Communicator& comm) { bench(arguments, comm); });
}

}  // namespace

void add_bench_generate(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "generate", "Time the generation of text by a published model with random weights");
  auto arguments = std::make_shared<GenerateBenchArguments>();
  GenerateBench& request = arguments->request;
  command->add_option("--model", request.model, "Model that the sizes are of")
      ->capture_default_str()
      ->check(CLI::IsMember(benchmark_models()));
  command->add_option("--layers", request.layers, "Number of layers (default: all of the model)")
      ->check(CLI::Range(1, 4096));
  command->add_option("--vocab", request.vocab, "Tokens of the vocabulary (default: the model's)")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--tp", request.tp, "Tensor-parallel ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--batch", request.batch, "Sequences generated at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--prompt", request.prompt, "Tokens of a prompt")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--new", request.max_tokens, "Tokens of a completion")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  add_prompt_rows_option(*command, request.prompt_rows);
  add_batch_invariant_flag(*command, request.batch_invariant);
  command->add_flag_function(
      "--run-ahead,!--no-run-ahead",
      [arguments](int64_t value) { arguments->request.runs_ahead = value > 0; },
      "Launch a step before the tokens of the one before are known (default: on GPUs)");
  command
      ->add_option("--mixed-rows", request.mixed_rows,
                   "Max rows of a step that also generates tokens (default: all)")
      ->check(CLI::Range(1, 1 << 16));
  command
      ->add_option("--min-prompt", request.min_prompt,
                   "Give prompts random lengths from N to --prompt (default: one length)")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option("--rate", request.rate,
                   "Send requests at random times, on average X a second (a Poisson process), "
                   "instead of all at once")
      ->check(CLI::Range(1e-3, 1e6));
  command->add_option("--requests", request.requests, "Number of requests, with --rate")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--temperature", request.sampling.temperature, "Temperature of the sampling")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  command->add_option("--top-k", request.sampling.top_k, "Sample from the N likeliest (0: all)")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 24));
  command
      ->add_option("--top-p", request.sampling.top_p,
                   "Sample from the likeliest with this share of the probability")
      ->capture_default_str()
      ->check(CLI::Range(1e-9, 1.0));
  command->add_option("--dtype", request.dtype, "Data type of weights, keys and values")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_weights_option(*command, request.weights);
  add_device_options(*command, arguments->devices);
  command->add_option("--repeats", request.repeats, "Timed batches, without --rate")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  add_json_option(*command, arguments->output, "the result", "it");
  command->footer(
      "\nExamples:\n"
      "  tandem bench generate --model llama-1b --layers 4 --batch 8 --prompt 256 --new 64\n"
      "  tandem bench generate --layers 2 --batch 16 --rate 4 --requests 100\n"
      "\nFirst token: time from a request's arrival to its first token. Next token: from the one\n"
      "before. Token step: a step in which each of the batch has a row, and no prompt. Its bytes\n"
      "are those of the weights, keys and values read, compared with what a sum of memory on all\n"
      "CPU ranks reads. One request is repeated with no other. Exit code 1: its tokens or\n"
      "log-probabilities differ (on GPUs: by more than 0.1).");
  command->callback([arguments] {
    now_doing("bench generate " + arguments->request.model);
    run(*arguments);
  });
}

}  // namespace tandem::cli
