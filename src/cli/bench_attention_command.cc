#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/bench_attention.h"
#include "bench/bench_receipt.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

struct AttentionBenchArguments {
  AttentionBench request;
  int ranks = 0, cp = 0;
  bool causal = false, cross = false, contiguous = false;
  std::string dtype = "f32", codec = "none", link, link_label;
  ResultOutput output;
};

Json spread_of(const BenchTimes& times) {
  return {round_to(times.min_us, 100), round_to(times.max_us, 100)};
}

Json to_json(const AttentionBench& q, const AttentionBenchResult& r, const Communicator& comm,
             const std::string& link) {
  Json candidates = Json::object(), bytes = Json::object(), formulas = Json::object();
  for (const auto& [name, form] : r.forms) {
    candidates[name] = {{"median", round_to(form.times.median_us, 100)},
                        {"min", round_to(form.times.min_us, 100)},
                        {"max", round_to(form.times.max_us, 100)},
                        {"form", name_of(form.strategy)},
                        {"hidden", round_to(r.hidden(form.times), 1e4)}};
    bytes[name] = form.bytes;
    formulas[name] = form.bytes_formula;
  }
  const BenchTimes &serial = r.fastest(Strategy::serial),
                   &overlapped = r.fastest(Strategy::overlapped);
  const ContextShape& s = q.shape;
  Json json{{"op", "attention"},
            {"transport", comm.transport()},
            {"link", link},
            {"ranks", comm.size()},
            {"cp", comm.size()},
            {"batch", s.batch},
            {"seq", s.seq},
            {"keys", s.keys == 0 ? s.seq : s.keys},
            {"heads", s.heads},
            {"kv_heads", s.kv_heads},
            {"head_dim", s.head_dim},
            {"mask", s.causal ? "causal" : "cross"},
            {"window", q.window},
            {"rows", s.split == schedule::ContextSplit::balanced ? "balanced" : "contiguous"},
            {"passes", q.backward ? "both" : "forward"},
            {"dtype", name_of(s.dtype)},
            {"bytes", bytes},
            {"bytes_formula", formulas},
            {"strategy", name_of(r.forms.at(r.chosen_forward).strategy)},
            {"config",
             {{"threads_per_rank", kernel_threads()},
              {"chosen", r.chosen_forward},
              {"chosen_backward", q.backward ? Json(r.chosen_backward) : Json(nullptr)},
              {"fastest", r.fastest()},
              {"refused", r.refusals},
              {"candidates_us", candidates}}},
            {"codec", codec_json(s.wire, s.dtype)},
            {"time_us",
             {{"compute", round_to(r.compute.median_us, 100)},
              {"wire", round_to(r.wire.median_us, 100)},
              {"limit", round_to(r.limit_us(), 100)},
              {"serial", round_to(serial.median_us, 100)},
              {"overlapped", round_to(overlapped.median_us, 100)},
              {"chosen", round_to(r.chosen.median_us, 100)}}},
            {"spread_us",
             {{"compute", spread_of(r.compute)},
              {"wire", spread_of(r.wire)},
              {"serial", spread_of(serial)},
              {"overlapped", spread_of(overlapped)},
              {"chosen", spread_of(r.chosen)}}},
            {"repeats", q.repeats},
            {"hidden", round_to(r.hidden(r.chosen), 1e4)},
            {"error", {{"max_rel", r.max_rel}, {"max_of_bound", r.of_bound}, {"bound", 1}}},
            {"bitwise_equal_runs", r.same_bits},
            {"bytes_agree", r.same_bytes},
            {"receipt", to_json(r.receipts)}};
  json.update(origin_json(comm));
  return json;
}

std::string table(const AttentionBenchResult& r) {
  std::string text = fmt::format("{:<10} {:>10} {:>10} {:>12} {:>9}\n", "form", "ms", "min",
                                 "MB sent", "hidden %");
  const auto line = [&](const std::string& name, const BenchTimes& times, std::string mb,
                        std::string hidden) {
    text += fmt::format("{:<10} {:>10.3f} {:>10.3f} {:>12} {:>9}\n", name, times.median_us * 1e-3,
                        times.min_us * 1e-3, mb, hidden);
  };
  for (const auto& [name, form] : r.forms) {
    line(name, form.times, fmt::format("{:.3f}", double(form.bytes) * 1e-6),
         fmt::format("{:.1f}", 100 * r.hidden(form.times)));
  }
  line("chosen", r.chosen, "", fmt::format("{:.1f}", 100 * r.hidden(r.chosen)));
  line("compute", r.compute, "", "");
  line("wire", r.wire, "", "");
  if (!r.refusals.empty()) text += fmt::format("not run: {}\n", r.refusals);
  return text + receipt_lines(r.receipts, 100);
}

void run(const AttentionBenchArguments& arguments, Communicator& comm) {
  const AttentionBenchResult result = run_attention_bench(comm, arguments.request);
  if (comm.rank() == 0) {
    const std::string link = arguments.link_label.empty() ? comm.link() : arguments.link_label;
    arguments.output.write(table(result), to_json(arguments.request, result, comm, link));
  }
  if (!result.ok()) {
    throw Error(
        "bench attention: a result differs from the reference by more than the bound, "
        "between forms or runs, or bytes from their formula");
  }
}

void run_command(AttentionBenchArguments& arguments) {
  ContextShape& shape = arguments.request.shape;
  shape.causal = !arguments.cross;
  if (arguments.contiguous) shape.split = schedule::ContextSplit::contiguous;
  shape.dtype = arguments.dtype == "bf16" ? DType::bf16 : DType::f32;
  shape.wire = Wire::parse(arguments.codec);
  if (arguments.ranks > 0 && arguments.cp > 0 && arguments.ranks != arguments.cp) {
    throw InvalidArgument(fmt::format("bench attention: --cp {}: expected the {} ranks",
                                      arguments.cp, arguments.ranks));
  }
  const int ranks = std::max(arguments.ranks, arguments.cp);
  WorldOptions world{.ranks = ranks > 0 ? ranks : launched() ? 1 : 2};
  if (!arguments.link.empty()) world.link = EmulatedLink::parse(arguments.link);
  arguments.output.check();
  run_world(world, with_kernel_threads([&](Communicator& comm) { run(arguments, comm); }));
}

void add_shape(CLI::App& command, AttentionBenchArguments& arguments) {
  ContextShape& shape = arguments.request.shape;
  shape = {.seq = 1024, .heads = 8, .kv_heads = 2, .head_dim = 64};
  const CLI::Range extent(int64_t{1}, int64_t{1} << 24);
  const auto size = [&](const char* name, int64_t& value, const char* help) {
    return command.add_option(name, value, help)->capture_default_str()->check(extent);
  };
  size("--batch", shape.batch, "Sequences");
  size("--seq", shape.seq, "Positions of queries over all ranks");
  command.add_option("--keys", shape.keys, "Positions of keys over all ranks (default: --seq)")
      ->check(extent);
  size("--heads", shape.heads, "Query heads");
  size("--kv-heads", shape.kv_heads, "Key and value heads");
  size("--head-dim", shape.head_dim, "Features of a head");
  auto* cross =
      command.add_flag("--cross", arguments.cross, "Cross-attention: every query reads every key");
  command
      .add_flag("--causal", arguments.causal,
                "Causal self-attention with rotary embedding (default)")
      ->excludes(cross);
  command
      .add_option("--window", arguments.request.window,
                  "Causal: keys that a query reads; 0: all before it")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->excludes(cross);
  command.add_flag("--contiguous", arguments.contiguous,
                   "One chunk of positions per rank, not head and tail chunks");
  command.add_option("--dtype", arguments.dtype, "Element type")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  command
      .add_option("--codec", arguments.codec,
                  "Wire format of keys and values (int8:g64): groups within a head")
      ->capture_default_str();
}

}  // namespace

void add_bench_attention(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "attention", "Time context-parallel attention: gather, ring, heads, queries");
  auto arguments = std::make_shared<AttentionBenchArguments>();
  add_shape(*command, *arguments);
  command->add_flag("--backward", arguments->request.backward, "Time both passes as one");
  command->add_option("--ranks", arguments->ranks, "Ranks (default: 2, or a launcher's number)")
      ->check(CLI::Range(2, 64));
  command
      ->add_option("--cp", arguments->cp, "Context-parallel ranks: all of them (default: --ranks)")
      ->check(CLI::Range(2, 64));
  command->add_option("--link", arguments->link,
                      "Emulate this link between thread ranks (25MB/s,100us)");
  command->add_option("--link-label", arguments->link_label,
                      "Name of the real link in the result, such as \"tbf 1gbit\"");
  command->add_option("--repeats", arguments->request.repeats, "Timed rounds")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  add_json_option(*command, arguments->output, "the result", "it");
  command->footer(
      "\nExample:\n"
      "  tandem bench attention --ranks 2 --seq 256 --heads 4 --kv-heads 4 --head-dim 32 --link "
      "1GB/s,20us --repeats 3\n"
      "\nForms: gather sends keys and values, then computes; ring computes the local keys first "
      "and\n"
      "others as they arrive; heads exchanges whole sequences of some heads; queries sends "
      "queries\n"
      "and returns partial results. With --codec all forms read the rounded keys and values, and "
      "all but\n"
      "queries send them encoded. chosen: the tuner's. compute, wire: the blocks, and the bytes "
      "of\n"
      "the form that sends least, alone. hidden: share of the smaller of the two that a form "
      "hides.\n"
      "Exit code 1: a result differs from the reference, forms differ in a bit, or bytes from "
      "their\n"
      "formula.");
  command->callback([arguments] {
    now_doing("bench attention");
    run_command(*arguments);
  });
}

}  // namespace tandem::cli
