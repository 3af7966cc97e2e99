#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/output.h"
#include "core/system/printable.h"
#include "engine/report/trace/layer.h"
#include "engine/report/trace/timeline_svg.h"
#include "engine/report/trace/trace_times.h"
#include "observe/trace_merge.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct TraceOptions {
  std::string file, svg, merged, steps;
  PictureOptions picture;
  bool all = false;
};

/// Title with the step and layer shown, if known.
std::string title_of(std::string title, int64_t step, bool layer) {
  if (step >= 0) title += fmt::format(", step {}", step);
  return layer ? title + ", second layer, forward pass" : title;
}

/// "FIRST:LAST" or "STEP".
StepRange parse_steps(const std::string& text) {
  StepRange range;
  if (text.empty()) return range;
  const size_t colon = std::min(text.find(':'), text.size());
  const auto read = [&](size_t begin, size_t end, int64_t& value) {
    const auto parsed = std::from_chars(text.data() + begin, text.data() + end, value);
    if (parsed.ec == std::errc() && parsed.ptr == text.data() + end && value >= 0) return;
    throw InvalidArgument(
        fmt::format("--steps {}: expected FIRST:LAST or one step", printable(text)));
  };
  read(0, colon, range.first);
  range.last = range.first;
  if (colon < text.size()) read(colon + 1, text.size(), range.last);
  if (range.last < range.first) {
    throw InvalidArgument(
        fmt::format("--steps {}: expected a last step after the first", printable(text)));
  }
  return range;
}

/// Merges the events of all ranks in OUT/trace.
void merge(const TraceOptions& options) {
  const StepRange steps = parse_steps(options.steps);
  const std::string inside = options.file + "/trace";
  const std::string folder = path_exists(inside) ? inside : options.file;
  now_doing("merging " + folder);
  const MergedFile merged = write_merged_trace(folder, steps, options.merged);
  fmt::print(
      "Wrote {}: {} events and {} arrows of {} ranks, steps {} to {}, clocks within {} us{}\n",
      single_line(options.merged), merged.trace.events, merged.arrows, merged.trace.ranks,
      merged.trace.first_step, merged.trace.last_step, microseconds(merged.trace.clock_bound),
      merged.trace.dropped == 0
          ? ""
          : fmt::format("; {} events were not recorded", merged.trace.dropped));
}

// Rejects a folder or a missing file, with a suggestion.
void check_file(const std::filesystem::path& file) {
  std::error_code unknown;  // reported by the later read
  const bool folder = std::filesystem::is_directory(file, unknown);
  if (!folder && path_exists(file)) return;
  const std::filesystem::path inside = file / "trace.json";
  if (folder && !path_exists(inside) && path_exists(file / "trace")) {
    throw InvalidArgument(
        fmt::format("trace {}: a folder: expected a file: tandem trace {} --merge FILE",
                    file.string(), shell_quote(file.string())));
  }
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
  auto* command = app.add_subcommand("trace", "Draw and summarize a recorded timeline");
  auto options = std::make_shared<TraceOptions>();
  command
      ->add_option("FILE", options->file,
                   "trace.json of tandem train, or a file that tandem bench --timeline wrote; with "
                   "--merge, the --out of a run")
      ->required();
  auto* const merged =
      command->add_option("--merge", options->merged,
                          "Write one trace of all ranks and steps of a run, recorded with "
                          "trace.stream_mib, as JSON for ui.perfetto.dev, instead of a picture");
  command->add_option("--steps", options->steps, "Steps to merge, with --merge (default: all)")
      ->needs(merged);
  command->add_option("--svg", options->svg,
                      "File of the picture (default: FILE with the ending .svg)");
  command->add_option("--title", options->picture.title,
                      "Title of the picture (default: FILE and the part of it that is shown)");
  command
      ->add_option("--rows", options->picture.processors,
                   "Multiprocessors of each GPU to show, evenly spread")
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxProcessor));
  command->add_flag("--all", options->all,
                    "Show all layers, also those that one repeated layer would stand for");
  command->footer(
      "Prints, of each rank's time, what went to products, other computation, exposed waiting and\n"
      "sending (concurrently), averaged over a GPU's multiprocessors (SMs).\n\n"
      "Examples:\n"
      "  tandem train configs/tiny.toml --tp 2 --out out/shown --set trace.enabled=true\n"
      "  tandem trace out/shown/trace.json                         writes out/shown/trace.svg\n"
      "  tandem bench gemm_rs --ranks 4 --m 1024 --link 400MB/s,30us --timeline rs.json\n"
      "  tandem trace rs.json --title \"GEMM+RS\"                    writes rs.svg\n"
      "  tandem train configs/tiny.toml --tp 2 --out out/streamed --set trace.stream_mib=64\n"
      "  tandem trace out/streamed --merge all.json --steps 20:40");
  command->callback([options] { options->merged.empty() ? draw(*options) : merge(*options); });
}

}  // namespace tandem::cli
