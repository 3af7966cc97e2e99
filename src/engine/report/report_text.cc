#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/system/printable.h"
#include "engine/report/report_data.h"

namespace tandem::report {
namespace {

double number(const Json& value) {
  return value.is_number() ? value.get<double>() : std::nan("");
}
std::string fixed(const Json& value, int digits) {
  return value.is_number() ? fmt::format("{:.{}f}", value.get<double>(), digits) : "-";
}

std::string format_held_out(const Json& comparison) {
  std::string text = fmt::format("Held-out text: {} files, {:.2f} MB, each file alone\n",
                                 fixed(comparison["files"], 0), number(comparison["bytes"]) / 1e6);
  text += fmt::format("  {:<12} {:>6} bits per byte\n", "tandem",
                      fixed(comparison["model_bits_per_byte"], 3));
  for (const Json& row : comparison["compressors"]) {
    text += fmt::format("  {:<12} {:>6} bits per byte\n", row["name"].get<std::string>(),
                        fixed(row["bits_per_byte"], 3));
  }
  return text + "\n";
}

std::string split_text(const Json& split) {
  std::string text = fmt::format(
      "Step time in ms, {} link: serial and overlapped steps in turns,\n"
      "mean of the middle half of the pairs, of the rank that computes longest;\n"
      "GEMM, other, exposed and rest add up to the step\n",
      split["link"].get<std::string>());
  if (split["link_choice"].is_string()) text += split["link_choice"].get<std::string>() + "\n";
  text += fmt::format("  {:<11} {:>8} {:>9} {:>9} {:>9} {:>8} {:>8}\n", "strategy", "step", "GEMM",
                      "other", "exposed", "rest", "ECT");
  text += fmt::format("  {:<11} {:>8} {:>9} {:>9} {:>9}\n", "", "", "", "compute", "comm");
  for (const Json& row : split["rows"]) {
    text += fmt::format(
        "  {:<11} {:>8} {:>9} {:>9} {:>9} {:>8} {:>8}\n", row["strategy"].get<std::string>(),
        fixed(row["step_ms"], 2), fixed(row["gemm_ms"], 2), fixed(row["other_compute_ms"], 2),
        fixed(row["exposed_comm_ms"], 2), fixed(row["rest_ms"], 2), fixed(row["ect_ms"], 2));
  }
  for (const Json& row : split["rows"]) {
    text += fmt::format("  GEMM is {:.0f} % of the {} step\n",
                        100 * number(row["gemm_ms"]) / number(row["step_ms"]),
                        row["strategy"].get<std::string>());
  }
  text += fmt::format("  overlapped was faster in {} of {} pairs of steps;\n  {}\n",
                      fixed(split["pairs_overlapped_faster"], 0), fixed(split["pairs"], 0),
                      split["verdict"].get<std::string>());
  text += fmt::format("  E = 1 - ECT(overlapped) / ECT(serial) = {} %{}\n\n",
                      split["efficiency"].is_null()
                          ? "-"
                          : fmt::format("{:.1f}", 100 * number(split["efficiency"])),
                      split["shown"].get<bool>() ? "" : ", not shown today");
  if (split["warning"].is_string()) text += split["warning"].get<std::string>() + "\n\n";
  return text;
}

std::string compared_text(const Json& compared) {
  size_t width = 4;
  for (const Json& run : compared["runs"]) {
    width = std::max(width, printable(run["name"].get<std::string>()).size());
  }
  std::string text = fmt::format("  {:<{}} {:>8} {:>9} {:>11} {:>10}\n", "run", width, "steps",
                                 "loss", "validation", "tokens/s");
  for (const Json& run : compared["runs"]) {
    text += fmt::format("  {:<{}} {:>8} {:>9} {:>11} {:>10}\n",
                        printable(run["name"].get<std::string>()), width, fixed(run["steps"], 0),
                        fixed(run["final_loss"], 4), fixed(run["validation_loss"], 4),
                        fixed(run["tokens_per_s"], 0));
  }
  if (compared["settings"].empty()) return text + "No setting differs.\n\n";
  text += "Settings that differ, in this order:\n";
  for (const Json& setting : compared["settings"]) {
    text += fmt::format("  {}:", setting["key"].get<std::string>());
    for (const Json& value : setting["values"]) {
      text += fmt::format("{}{}", &value == &setting["values"][0] ? " " : " | ",
                          value.is_null() ? "-" : printable(value.get<std::string>()));
    }
    text += '\n';
  }
  return text + "\n";
}

}  // namespace

std::string as_text(const Json& summary) {
  const Json& training = summary["training"];
  std::string text =
      fmt::format("Training: {} steps, {} tokens/s, {} ms a step", fixed(training["steps"], 0),
                  fixed(training["tokens_per_s"], 0), fixed(training["step_ms"], 1));
  if (training["gemm_share"].is_number()) {
    text += fmt::format(", GEMM {:.0f} % of it", 100 * number(training["gemm_share"]));
  }
  if (training["mfu"].is_number()) {
    text += fmt::format(", MFU {:.0f} %", 100 * number(training["mfu"]));
  }
  if (training["validation_loss"].is_number()) {
    text += fmt::format("\nValidation loss: {} nats", fixed(training["validation_loss"], 4));
    if (training.contains("validation_unit")) {
      text += " per " + training["validation_unit"].get<std::string>();
    }
  }
  if (training.contains("expert_imbalance")) {
    text += "\nExperts: rows of the fullest over the mean, by layer:";
    for (const Json& layer : training["expert_imbalance"]) text += " " + fixed(layer, 2);
  }
  text += "\n\n";
  if (summary.contains("compared")) text += compared_text(summary["compared"]);
  if (summary["held_out"].is_object()) text += format_held_out(summary["held_out"]);
  if (summary["step_split"].is_object()) text += split_text(summary["step_split"]);
  for (const Json& line : summary["overlap"]) {
    text += single_line(line.get<std::string>()) + '\n';
  }
  if (!summary["overlap"].empty()) text += '\n';
  for (const Json& what : summary["omitted"]) {
    text += fmt::format("Not shown: {}\n", what.get<std::string>());
  }
  return text;
}

}  // namespace tandem::report
