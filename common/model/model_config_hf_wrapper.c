/* Checkpoints of models that see images too: their config.json wraps a text model's, which is in
 * "text_config". Only that part is served, so it is read as the text class's own file would be.
 *
 * What generation needs may stand beside "text_config", and counts before what stands in it. Who
 * decides on a tied head is the class that has the head: the wrapper of Gemma 3, the text model in
 * Llama 4.
 */
#include <stdio.h>
#include <string.h>

#include "common/model/model_config_hf_internal.h"

static const hf_wrapper wrappers[] = {
    {.class_name = "Gemma3ForConditionalGeneration",
     .model_type = "gemma3",
     .text_type = "gemma3_text",
     .has_head = true},
    {.class_name = "Llama4ForConditionalGeneration",
     .model_type = "llama4",
     .text_type = "llama4_text"},
};

static bool text_is(const char *text, const char *wanted)
{
    return text != NULL && strcmp(text, wanted) == 0;
}

pgd_err model_config_hf__unwrap(hf_reader *r, const char *class_name, const char *model_type)
{
    for (size_t i = 0; i < PGD_ARRAY_LEN(wrappers); i++) {
        if (class_name != NULL ? text_is(class_name, wrappers[i].class_name)
                               : text_is(model_type, wrappers[i].model_type))
            r->wrapper = &wrappers[i];
    }
    if (r->wrapper == NULL)
        return PGD_OK;
    const cJSON *text = json_get(r->outer, "text_config");
    if (!cJSON_IsObject(text))
        return pgd_fail(r->why, PGD_EFORMAT,
                        "expected an object \"text_config\" in a model of \"%s\", got %s",
                        r->wrapper->class_name, text == NULL ? "none" : "another JSON value");
    const cJSON *type = json_get(text, "model_type");
    if (type != NULL && !text_is(json_string(type), r->wrapper->text_type)) {
        const char *got = json_string(type);
        return pgd_fail(r->why, PGD_EUNSUPPORTED,
                        "expected \"model_type\" %s in \"text_config\", got \"%.40s\"",
                        r->wrapper->text_type, got != NULL ? got : "another JSON value");
    }
    r->json = text;
    r->cfg->is_text_part = true;
    return PGD_OK;
}

const cJSON *model_config_hf__holder(const hf_reader *r, const char *name)
{
    return json_get(r->outer, name) != NULL ? r->outer : r->json;
}
