#include "schedule/options.h"

#include <charconv>
#include <sstream>
#include <utility>

#include "base/status.h"

namespace ddl {
namespace {

Error wrong(const std::string& message) { return Error(DDL_ERROR_ARGUMENT, "DDL_OPTIONS: " + message); }

int number(const std::string& text, const std::string& of, int low, int high) {
    int value = 0;
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stopped != end || text.empty() || value < low || value > high) {
        throw wrong(of + " is '" + text + "', but must be a whole number from " + std::to_string(low) + " to " +
                    std::to_string(high));
    }
    return value;
}

void parse_mode(const std::string& text, Options& options) {
    constexpr int kMost = 1 << 20;
    const size_t colon = text.find(':');
    options.modes = text.substr(0, colon);
    if (options.modes.empty()) throw wrong("-mode has no letter: b, n, r, m or p");
    for (const char mode : options.modes) {
        if (mode == 'c') throw wrong("mode 'c' (RCS) of the original is not built: take b, n, r, m or p");
        if (std::string("bnrmp").find(mode) == std::string::npos) {
            throw wrong(std::string("unknown mode '") + mode + "' in '" + text + "': allowed are b, n, r, m and p");
        }
    }
    options.dimensions.clear();
    if (colon == std::string::npos) return;
    std::string rest = text.substr(colon + 1);
    for (bool more = true; more;) {
        const size_t cross = rest.find('x');
        more = cross != std::string::npos;
        options.dimensions.push_back(number(rest.substr(0, cross), "a dimension of '" + text + "'", 1, kMost));
        if (more) rest = rest.substr(cross + 1);
    }
    if (options.modes.size() > 1 && options.modes.size() != options.dimensions.size()) {
        throw wrong("'" + text + "' has " + std::to_string(options.modes.size()) + " modes for " +
                    std::to_string(options.dimensions.size()) + " dimensions: give one for all, or one for each");
    }
}

}  // namespace

Options parse_options(const std::string& text) {
    constexpr int kMany = 1 << 30;
    Options options;
    const struct {
        const char* name;
        int* value;
        int high;
    } numbers[] = {{"dump_iter", &options.dump_iter, kMany},
                   {"dev_sync", &options.dev_sync, 2},
                   {"rebind_iter", &options.rebind_iter, kMany},
                   {"dbg_level", &options.dbg_level, 2},
                   {"shared_memory", &options.shared_memory, 1}};
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        const size_t dashes = word.rfind("--", 0) == 0 ? 2 : word.rfind('-', 0) == 0 ? 1 : 0;
        const std::string name = word.substr(dashes);
        std::string value;
        if (dashes == 0) throw wrong("'" + word + "' is not an option: options begin with a dash");
        if (!(words >> value)) throw wrong("'" + word + "' has no value");
        bool known = name == "mode";
        if (known) parse_mode(value, options);
        for (const auto& entry : numbers) {
            if (name != entry.name) continue;
            *entry.value = number(value, word, 0, entry.high);
            known = true;
        }
        if (!known) {
            throw wrong("unknown option '" + word +
                        "': known are -mode, -dump_iter, -dev_sync, -rebind_iter, -dbg_level and -shared_memory");
        }
    }
    return options;
}

std::string format_dimensions(const std::vector<int>& dimensions) {
    std::string text;
    for (const int dimension : dimensions) text += (text.empty() ? "" : "x") + std::to_string(dimension);
    return text;
}

std::string idle_options(const Options& options) {
    std::string idle;
    const std::pair<const char*, int> numbers[] = {
        {"-dump_iter", options.dump_iter}, {"-dev_sync", options.dev_sync}, {"-rebind_iter", options.rebind_iter}};
    for (const auto& [name, value] : numbers) {
        if (value != 0) idle += (idle.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(value);
    }
    return idle.empty() ? "" : "DDL_OPTIONS: ignored, because only PowerAI's DDL used it: " + idle;
}

std::string format_options(const Options& options) {
    std::string text = "-mode " + options.modes;
    if (!options.dimensions.empty()) text += ":" + format_dimensions(options.dimensions);
    const std::pair<const char*, int> numbers[] = {{"-dump_iter", options.dump_iter},
                                                   {"-dev_sync", options.dev_sync},
                                                   {"-rebind_iter", options.rebind_iter},
                                                   {"-dbg_level", options.dbg_level}};
    for (const auto& [name, value] : numbers) {
        if (value != 0) text += std::string(" ") + name + " " + std::to_string(value);
    }
    if (options.shared_memory == 0) text += " -shared_memory 0";
    return text;
}

Plan plan_of_options(const Options& options, int size, std::vector<int> ranks) {
    if (options.modes.find('p') != std::string::npos) {
        throw Error(DDL_ERROR_ARGUMENT, "mode p has no plan before the links are measured");
    }
    const auto asked = options.dimensions.empty() ? std::vector<int>{size} : options.dimensions;
    // Checked with the user's own dimensions, so that an error quotes them.
    Plan plan =
        make_plan(size, asked, options.modes, std::move(ranks), "as DDL_OPTIONS asks: " + format_options(options));
    std::vector<int> dimensions;
    std::string modes;
    for (size_t i = 0; i < asked.size(); ++i) {
        if (asked[i] == 1) continue;
        dimensions.push_back(asked[i]);
        modes += plan.modes[i];
    }
    if (dimensions.empty()) return plan;  // one rank
    plan.dimensions = dimensions;
    plan.modes = modes;
    return plan;
}

}  // namespace ddl
