#include "engine/model/side_files.h"

#include <charconv>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "core/system/files.h"
#include "core/system/json.h"
#include "engine/model/config_value.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxFile = size_t{64} << 20;
constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
constexpr const char* kTemplate = "chat_template";
constexpr const char* kClass = "tokenizer_class";
constexpr const char* kDecoder = "added_tokens_decoder";
constexpr const char* kDefault = "default";
constexpr const char* kGeneration = "generation_config.json";
constexpr const char* kTemplateFile = "chat_template.jinja";
constexpr const char* kMoreTemplates = "additional_chat_templates";
constexpr std::string_view kTemplateEnd = ".jinja";

/// The object in a file; null without it.
Json read_object(const std::string& file) {
  if (!path_exists(file)) return {};
  Json root = parse_json<Json>(read_small_file(file, kMaxFile));
  if (!root.is_object()) throw ConfigError(file + ": expected a JSON object");
  return root;
}

/// A member; null without it.
const Json& find(const Json& object, std::string_view key) {
  static const Json null;
  const auto found = object.is_object() ? object.find(key) : object.end();
  return found == object.end() ? null : *found;
}

/// Text of a token: a string, or the content of an object.
std::optional<std::string> token_text(const Json& value) {
  const Json& text = value.is_object() ? find(value, "content") : value;
  if (!text.is_string()) return {};
  return text.get<std::string>();
}

bool read_flag(const Json& token, const char* key, bool otherwise, const std::string& file) {
  const Json& value = find(token, key);
  return value.is_null() ? otherwise : parse_value<bool>(value, key, file);
}

std::optional<bool> read_flag(const Json& root, const char* key, const std::string& file) {
  const Json& value = find(root, key);
  if (value.is_null()) return {};
  return parse_value<bool>(value, key, file);
}

class Reader {
 public:
  explicit Reader(const std::string& folder)
      : config_file_(folder + "/tokenizer_config.json"), config_(read_object(config_file_)) {
    files_.folder = folder;
    files_.has_tokenizer_config = !config_.is_null();
    files_.adds_bos = read_flag(config_, "add_bos_token", config_file_);
    files_.adds_eos = read_flag(config_, "add_eos_token", config_file_);
    files_.is_legacy = read_flag(config_, "legacy", config_file_);
    files_.adds_prefix_space = read_flag(config_, "add_prefix_space", config_file_);
    if (const Json& name = find(config_, kClass); !name.is_null()) {
      files_.tokenizer_class = parse_value<std::string>(name, kClass, config_file_);
    }
    files_.generation = read_object(folder + "/" + kGeneration);
  }

  SideFiles read() {
    const Json map = read_object(files_.folder + "/special_tokens_map.json");
    const bool has_decoder = find(config_, kDecoder).is_object();
    for (const Json* root : {has_decoder ? &map : &config_, has_decoder ? &config_ : &map}) {
      read_special_tokens(*root);
    }
    if (has_decoder) read_decoder(config_[kDecoder]);
    read_added(files_.folder + "/added_tokens.json");
    for (const std::string& content : special_) add({.content = content});
    read_template_files();
    if (files_.templates.empty()) {
      read_templates(find(config_, kTemplate), config_file_ + ": " + kTemplate);
    }
    if (files_.templates.empty()) {
      const std::string file = files_.folder + "/chat_template.json";
      read_templates(find(read_object(file), kTemplate), file + ": " + kTemplate);
    }
    return std::move(files_);
  }

 private:
  void add(SideToken token) {
    if (token.content.empty() || !known_.insert(token.content).second) return;
    token.is_special = token.is_special || special_.contains(token.content);
    files_.added.push_back(std::move(token));
  }

  /// Keys in _token, and the lists additional_special_tokens and extra_special_tokens. A later
  /// root's keys replace those before, null too.
  void read_special_tokens(const Json& root) {
    if (!root.is_object()) return;
    for (const auto& [key, value] : root.items()) {
      if (key.ends_with("_special_tokens") && value.is_structured()) {
        for (const Json& each : value) {
          if (const auto text = token_text(each)) special_.insert(*text);
        }
      } else if (key.ends_with("_token") && !value.is_boolean()) {
        const auto text = token_text(value);
        if (!text && !value.is_null()) continue;
        files_.special_tokens[key] = text.value_or("");
        if (text) special_.insert(*text);
      }
    }
  }

  /// {"7": {"content": …}}
  void read_decoder(const Json& decoder) {
    const std::string where = config_file_ + ": " + kDecoder;
    for (const auto& [number, token] : decoder.items()) {
      int32_t id = -1;
      const char* const end = number.data() + number.size();
      const auto parsed = std::from_chars(number.data(), end, id);
      if (parsed.ec != std::errc() || parsed.ptr != end || id < 0) {
        reject_value(where, printable(number), token, "a number from 0 for its name");
      }
      const auto content = token_text(token);
      if (!content) reject_value(where, number, token, "an object with a content, a string");
      const bool is_special = read_flag(token, "special", false, where);
      add({*content, id, is_special, read_flag(token, "lstrip", false, where),
           read_flag(token, "rstrip", false, where),
           read_flag(token, "normalized", !is_special, where),
           read_flag(token, "single_word", false, where)});
    }
  }

  /// {"<|im_end|>": 7}
  void read_added(const std::string& file) {
    const Json root = read_object(file);
    if (root.is_null()) return;
    for (const auto& [content, id] : root.items()) {
      const auto number = parse_value<int64_t>(id, printable(content), file);
      if (number < 0 || number > std::numeric_limits<int32_t>::max()) {
        reject_value(file, printable(content), id, "a token from 0");
      }
      add({.content = content, .id = int32_t(number)});
    }
  }

  void add_template(const std::string& name, const std::string& file, std::string text) {
    if (text.size() > kMaxTemplateBytes) throw ConfigError(file + ": more than 1 MiB");
    files_.templates.try_emplace(name, ChatTemplateText{file, std::move(text)});
  }

  void read_template_files() {
    const std::string file = files_.folder + "/" + kTemplateFile;
    if (path_exists(file)) add_template(kDefault, file, read_small_file(file, kMaxFile));
    const std::string more = files_.folder + "/" + kMoreTemplates;
    for (const std::string& name : names_in(more)) {
      if (!name.ends_with(kTemplateEnd)) continue;
      const std::string path = more + "/" + name;
      add_template(name.substr(0, name.size() - kTemplateEnd.size()), path,
                   read_small_file(path, kMaxFile));
    }
  }

  /// A text, a list of {"name", "template"}, or an object of texts by name.
  void read_templates(const Json& value, const std::string& where) {
    if (value.is_string()) return add_template(kDefault, where, value.get<std::string>());
    if (!value.is_structured()) return;
    for (const auto& [key, each] : value.items()) {
      const Json& name = value.is_array() ? find(each, "name") : Json(key);
      const Json& text = value.is_array() ? find(each, "template") : each;
      if (!name.is_string() || !text.is_string()) continue;
      const auto named = name.get<std::string>();
      add_template(named, where + " " + printable(named), text.get<std::string>());
    }
  }

  std::string config_file_;
  Json config_;
  SideFiles files_;
  std::set<std::string> special_, known_;  ///< texts of special and of added tokens
};

/// generation_config.json of a config.json; empty if that names no tokens.
std::string make_generation_config(const std::string& config) {
  Json made{{"_from_model_config", true}};
  const Json root = read_object(config);
  for (const char* key : kTokenIds) {
    if (const Json& id = find(root, key); !id.is_null()) made[key] = id;
  }
  return made.size() > 1 ? dump_json(made, 2) + "\n" : "";
}

}  // namespace

SideFiles read_side_files(const std::string& folder) {
  return Reader(folder).read();
}

void copy_side_files(const std::string& from, const std::string& to) {
  const auto copy = [&](const std::string& name) {
    if (!path_exists(from + "/" + name)) return;
    replace_file(to + "/" + name, read_small_file(from + "/" + name, kMaxFile));
  };
  for (const char* name : {"added_tokens.json", "tokenizer_config.json", "special_tokens_map.json",
                           kGeneration, kTemplateFile, "chat_template.json"}) {
    copy(name);
  }
  if (!path_exists(from + "/" + kGeneration)) {
    const std::string made = make_generation_config(from + "/config.json");
    if (!made.empty()) replace_file(to + "/" + kGeneration, made);
  }
  const std::vector<std::string> more = names_in(from + "/" + kMoreTemplates);
  if (!more.empty()) make_directories(to + "/" + kMoreTemplates);
  for (const std::string& name : more) {
    if (name.ends_with(kTemplateEnd)) copy(std::string(kMoreTemplates) + "/" + name);
  }
}

}  // namespace tandem
