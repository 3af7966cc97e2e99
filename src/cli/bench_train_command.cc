#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "bench/bench_receipt.h"
#include "bench/engine/bench_train.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "engine/model/published_models.h"
#include "engine/plan/cost/activations.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct TrainBenchArguments {
  TrainBench request;
  DeviceOptions devices;
  ResultOutput output;
};

/// Time that the step takes longer than the same layers without communication.
double exposed_us(const TrainBenchResult& r) {
  return r.alone ? r.step.median_us - r.alone->median_us : 0;
}

/// Share of the serial form's exposed communication that is hidden; nullopt if it exposes less than
/// the rounds' noise.
std::optional<double> efficiency(const TrainBenchResult& r) {
  const double serial_us = r.serial->median_us - r.alone->median_us;
  if (serial_us < r.serial->max_us - r.serial->min_us) return {};
  return 1 - exposed_us(r) / serial_us;
}

nlohmann::ordered_json json_of(const TrainBench& q, const TrainBenchResult& r,
                               const Communicator& comm) {
  nlohmann::ordered_json us, spread;
  const auto add = [&](const char* name, const BenchTimes& times) {
    us[name] = round_to(times.median_us, 100);
    spread[name] = {round_to(times.min_us, 100), round_to(times.max_us, 100)};
  };
  const auto mfu_of = [&](const BenchTimes& times) {
    const double mfu = r.mfu(times.median_us);
    return mfu > 0 ? nlohmann::ordered_json(round_to(mfu, 1e4)) : nullptr;
  };
  add("step", r.step);
  add("sustained", r.sustained);
  if (r.serial) add("serial", *r.serial);
  if (r.alone) add("alone", *r.alone);
  nlohmann::ordered_json json = {
      {"op", "train"},
      {"model", q.model},
      {"layers", q.layers},
      {"seq", q.seq},
      {"window", q.window},
      {"documents", q.documents},
      {"batch", q.batch},
      {"tp", q.tp},
      {"ep", q.ep},
      {"ranks", comm.size()},
      {"transport", comm.transport()},
      {"dtype", q.dtype},
      {"gradient_dtype", q.gradient_dtype},
      {"residual_gradient", q.residual_gradient},
      {"deterministic", q.deterministic},
      {"recompute", q.recompute},
      {"time_us", us},
      {"spread_us", spread},
      {"repeats", q.repeats},
      {"tokens", q.seq * q.batch * q.ep},
      {"tflops", round_to(r.flops / r.step.median_us * 1e-6 / comm.size(), 100)},
      {"mfu", mfu_of(r.step)},
      {"mfu_sustained", mfu_of(r.sustained)},
      {"memory_bytes", r.memory_bytes},
      {"activation_bytes", r.activation_bytes},
      {"error", {{"max_of_bound", r.of_bound}, {"tensor", r.worst}}},
      {"bitwise_equal_runs", r.bitwise_equal_runs}};
  if (r.serial) {
    json["exposed_us"] = round_to(exposed_us(r), 100);
    const auto e = efficiency(r);
    json["efficiency"] = e ? nlohmann::ordered_json(round_to(*e, 1e4)) : nullptr;
  }
  json["receipt"] = to_json(r.receipts);
  json.update(origin_json(comm));
  return json;
}

std::string text_of(const TrainBench& q, const TrainBenchResult& r, const Communicator& comm) {
  const auto row = [&](const char* name, const BenchTimes& times) {
    const double mfu = r.mfu(times.median_us);
    return fmt::format(
        "  {:<10} {:>10.3f} ms  {:>8.1f} TFLOP/s a rank  MFU {}\n", name, times.median_us * 1e-3,
        r.flops / times.median_us * 1e-6 / comm.size(),
        mfu > 0 ? fmt::format("{:>5.1f} %", 100 * mfu) : "not measured (the machine was busy)");
  };
  std::string text = fmt::format(
      "{}, layers: {}, {} x {} tokens{}{}, tp {} ep {}, {}{}{}{}: forward and backward, {} "
      "repeats\n",
      q.model, q.layers, q.batch * q.ep, q.seq,
      q.window > 0 ? fmt::format(", window {}", q.window) : "",
      q.documents > 0 ? fmt::format(" in documents of {}", q.documents) : "", q.tp, q.ep, q.dtype,
      q.gradient_dtype == "f32" ? "" : ", gradients in " + q.gradient_dtype,
      q.residual_gradient == "f32" ? "" : ", residual gradient in " + q.residual_gradient,
      q.recompute == "none" ? "" : ", recompute " + q.recompute, q.repeats);
  text += row("step", r.step) + row("sustained", r.sustained);
  if (r.serial) {
    text += row("serial", *r.serial) + row("alone", *r.alone);
    const auto e = efficiency(r);
    text += fmt::format("  exposed {:.3f} ms, E {}\n", exposed_us(r) * 1e-3,
                        e ? fmt::format("{:.1f} %", 100 * *e) : "-: within the noise");
  }
  text += receipt_lines(r.receipts, 100);
  return text + fmt::format(
                    "  {:.2f} GB in use, activations {:.3f} GB; gradients within {:.2f} of their "
                    "bound ({}); two steps {}\n",
                    double(r.memory_bytes) * 1e-9, double(r.activation_bytes) * 1e-9, r.of_bound,
                    r.worst,
                    r.bitwise_equal_runs ? "equal bit for bit"
                    : r.deterministic    ? "DIFFER"
                                         : "differ, as allowed");
}

void bench(const TrainBenchArguments& arguments, Communicator& comm) {
  const TrainBenchResult result = run_train_bench(comm, arguments.request);
  if (comm.rank() == 0) {
    arguments.output.write(text_of(arguments.request, result, comm),
                           json_of(arguments.request, result, comm));
  }
  if (result.ok()) return;
  throw Error(
      fmt::format("bench train: {} differs from the reference by {:.2f} times the bound, "
                  "or results differ between runs or from those without recomputation",
                  result.worst, result.of_bound));
}

void run(TrainBenchArguments arguments) {
  TrainBench& q = arguments.request;
  DeviceOptions& devices = arguments.devices;
  WorldOptions world;
  world.ranks = q.tp * q.ep;
  const bool shares = devices.ranks_per_gpu > 1;
  const auto check_gpus = [&] {
    const TrainConfig config = train_bench_config(q, true, shares);
    const double bytes = q.gradient_dtype == "bf16" ? 4 : 6;  // of a bf16 weight and its gradient
    return bytes * double(config.model.parameters()) / world.ranks +
           rank_activation_bytes(config, 0, true);
  };
  set_devices(devices, world, {"", check_gpus});
  q.layers = train_bench_config(q, devices.on_gpus(), shares).model.layers;
  arguments.output.check();
  run_ranks(devices, world, [&](Communicator& comm) { bench(arguments, comm); });
}

}  // namespace

void add_bench_train(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "train", "Time layers of a published model: forward and backward pass, checked");
  auto arguments = std::make_shared<TrainBenchArguments>();
  TrainBench& request = arguments->request;
  command->add_option("--model", request.model, "Model that the layers are of")
      ->capture_default_str()
      ->check(CLI::IsMember(benchmark_models()));
  command->add_option("--layers", request.layers, "Number of layers (default: all of the model)")
      ->check(CLI::Range(1, 4096));
  command->add_option("--seq", request.seq, "Tokens of a sequence")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24));
  command
      ->add_option("--window", request.window,
                   "Sliding window: keys that a token attends to, with its own (default: 0, all)")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 24));
  command
      ->add_option("--documents", request.documents,
                   "Mean tokens of packed documents, exponentially distributed (default: 0, none)")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--batch", request.batch, "Sequences of a tensor-parallel group")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--tp", request.tp, "Tensor-parallel ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--ep", request.ep, "Expert-parallel ranks, each with its own tokens")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--dtype", request.dtype, "Data type of GEMM operands and activations")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16", "fp8"}));
  command
      ->add_option("--gradient-dtype", request.gradient_dtype,
                   "Data type of the weights' gradients (train.gradient_dtype)")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  command
      ->add_option("--residual-gradient", request.residual_gradient,
                   "Data type of the residual stream's gradient (train.residual_gradient)")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  command
      ->add_option(
          "--recompute", request.recompute,
          "Recompute activations (train.recompute), and compare with a step that saves all")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "selective", "full"}));
  command->add_flag("!--not-deterministic", request.deterministic,
                    "Run faster on GPUs, with other last bits in every run");
  add_device_options(*command, arguments->devices);
  command->add_option("--repeats", request.repeats, "Timed steps")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  add_json_option(*command, arguments->output, "the result", "it");
  command->footer(
      "\nExample:\n"
      "  tandem bench train --model llama-8b --layers 4 --seq 8192 --device gpu\n"
      "  tandem bench train --model llama-8b --layers 4 --seq 32768 --window 1024 --device gpu\n"
      "  tandem bench train --model llama-8b --layers 4 --seq 8192 --documents 1000 --device gpu\n"
      "\nA step is a forward and a backward pass through the layers, without embedding, head and\n"
      "optimizer. On GPUs step is timed after an idle gap and sustained without, where the power\n"
      "limit lowers the clock. With --tp, serial is the step without overlap and alone a rank's\n"
      "shards without communication; E = 1 - (step - alone) / (serial - alone). Gradients of one\n"
      "layer are compared with CPU ranks in f32. Exit code 1: a result was wrong.");
  command->callback([arguments] {
    now_doing("bench train " + arguments->request.model);
    run(*arguments);
  });
}

}  // namespace tandem::cli
