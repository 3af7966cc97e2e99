#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "cli/output.h"
#include "core/files.h"
#include "core/output.h"
#include "core/printable.h"
#include "engine/report/layer.h"
#include "engine/report/timeline_svg.h"
#include "engine/report/trace_times.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct TraceOptions {
  std::string file, svg;
  PictureOptions picture;
  bool all = false;
};

/// Title with the step and layer shown, if known.
std::string title_of(std::string title, int64_t step, bool layer) {
  if (step >= 0) title += fmt::format(", step {}", step);
  return layer ? title + ", second layer, forward pass" : title;
}

// Rejects a folder or a missing file, with a suggestion.
void check_file(const std::filesystem::path& file) {
  std::error_code unknown;  // reported by the later read
  const bool folder = std::filesystem::is_directory(file, unknown);
  if (!folder && path_exists(file)) return;
  const std::filesystem::path inside = file / "trace.json";
  throw IoError(fmt::format(
      "trace {}: {}: expected {}", file.string(), folder ? "a folder" : "no such file",
      folder && path_exists(inside)
          ? "a file: tandem trace " + shell_quote(inside.string())
          : "the trace.json of a run with trace.enabled=true, or what tandem bench --timeline "
            "wrote"));
}

void draw(const TraceOptions& options) {
  const std::filesystem::path file = options.file;
  check_file(file);
  now_doing("reading " + options.file);
  const auto ranks = read_trace(file);
  size_t events = 0;
  for (const RankEvents& rank : ranks) events += rank.events.size();
  if (events == 0) {
    throw IoError(fmt::format("trace {}: no events: expected at least one", file.string()));
  }
  std::filesystem::path svg = options.svg;
  const bool named = !svg.empty();
  if (!named) svg = std::filesystem::path(file).replace_extension(".svg");
  if (svg == file) throw InvalidArgument("--svg: expected another file than the trace");
  PictureOptions picture = options.picture;
  const Layer layer = one_layer(ranks);
  const auto& shown = options.all ? ranks : layer.ranks;
  if (picture.title.empty()) {
    picture.title =
        title_of(file.filename().string(), ranks.front().step, layer.repeats && !options.all);
  }
  const std::string text = timeline_svg(shown, picture);
  named ? write_output(svg, text)
        : replace_file(svg, text);  // does not write through an existing link
  fmt::print("{}Wrote {}; {} itself opens at ui.perfetto.dev\n", as_text(rank_times(shown)),
             single_line(svg.string()), single_line(file.string()));
}

}  // namespace

void add_trace(CLI::App& app) {
  auto* command = app.add_subcommand("trace", "Picture and figures of a recorded timeline");
  auto options = std::make_shared<TraceOptions>();
  command
      ->add_option("FILE", options->file,
                   "trace.json of `tandem train`, or what `tandem bench --timeline` wrote")
      ->required();
  command->add_option("--svg", options->svg, "The picture (default: FILE with the ending .svg)");
  command->add_option("--title", options->picture.title,
                      "What stands above it (default: FILE and what of it is shown)");
  command
      ->add_option("--rows", options->picture.processors,
                   "Multiprocessors of each GPU to show, evenly spread")
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxProcessor));
  command->add_flag("--all", options->all,
                    "All of it, where a layer that repeats would stand for the rest");
  command->footer(
      "Prints, of each rank's time, what went to products, other computation, exposed waiting and\n"
      "sending (concurrently), averaged over a GPU's multiprocessors (SMs).\n\n"
      "Examples:\n"
      "  tandem train configs/tiny.toml --tp 2 --out out/shown --set trace.enabled=true\n"
      "  tandem trace out/shown/trace.json                         writes out/shown/trace.svg\n"
      "  tandem bench gemm_rs --ranks 4 --m 1024 --link 400MB/s,30us --timeline rs.json\n"
      "  tandem trace rs.json --title \"GEMM+RS\"                    writes rs.svg");
  command->callback([options] { draw(*options); });
}

}  // namespace tandem::cli
